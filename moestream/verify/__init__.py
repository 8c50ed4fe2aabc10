"""Whether streamed logits are those of the same engine without streaming, on this machine and with this model."""
