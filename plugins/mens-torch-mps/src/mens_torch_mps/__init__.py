"""The Metal lane of the Mens plugins: torch.mps for memory and the queue, our kernels for the arithmetic."""
