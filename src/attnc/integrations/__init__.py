"""attnc inside other software: torch.compile, torch.export, torch.func, and torch's own attention functions."""
