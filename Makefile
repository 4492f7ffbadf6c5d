# `make demo` and `make test` need Python >= 3.11 and nothing else; each makes its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The registry's default torch is a CUDA build of several GB. On Linux the CPU build comes from PyTorch's
# own index; where that cannot be reached, whatever pip is configured with is tried.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
