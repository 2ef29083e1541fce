"""A fake router, see fake_role."""

from fake_role import main

main("router")
