"""What the CUDA transports share: checked driver calls, small kernels, workspaces."""
