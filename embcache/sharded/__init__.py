"""Tables spread over the processes of a ``torch.distributed`` group."""
