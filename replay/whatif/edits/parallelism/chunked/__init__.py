"""Work and the communication next to it, cut into chunks that run side by side."""
