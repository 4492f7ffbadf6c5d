"""What a recorded run says of its layers, so that other layouts of it can be computed."""
