"""What the transport over torch.distributed's libraries is made of."""
