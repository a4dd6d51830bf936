"""Real execution: programs lowered onto processes, devices and transports."""
