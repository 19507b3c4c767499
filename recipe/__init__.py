"""How the pair in ``mlx_lm_mtp/demo`` was made: ``python -m recipe --help``."""
