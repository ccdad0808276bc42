"""The three dialects of the road: `torch` (what the user wrote), `iree_linalg_ext` (attention as one op), `tile` (attention
as blocks)."""
