"""Large Kineto traces read by a compiled loop: when, `choice` says; `scanner` takes what `kernel` finds."""
