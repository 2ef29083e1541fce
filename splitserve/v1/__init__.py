"""Generated from proto/ by `make proto`. Touched only at network edges."""
