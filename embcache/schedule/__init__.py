"""The order in which staging, exchange and compute of training steps run."""
