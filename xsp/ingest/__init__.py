"""Make run directories of spans from other sources, which may arrive in any order and more than once."""
