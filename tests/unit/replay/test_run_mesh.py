from dpro.opening import open_path
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.mesh import axes_of_messages, description_of
from tests.jobs import ROOT


def test_calls_of_the_group_that_reduces_gradients_are_along_data_parallelism():
    graph = build_graph(open_path(ROOT / "sample_traces" / "slow_rank")).graph
    assert {message.op for message in graph.messages} == {"all_reduce", "broadcast"}
    assert set(axes_of_messages(graph)) == {"dp"}


def test_a_group_without_a_description_has_none():
    assert description_of("35 TENSOR_MODEL_PARALLEL_GROUP") == "TENSOR_MODEL_PARALLEL_GROUP"
    assert description_of("") == description_of("35") == ""
