"""Distil a drafter onto a target; ``mlx_lm_mtp train`` is its command."""
