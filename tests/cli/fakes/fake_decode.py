"""A fake decode, see fake_role."""

from fake_role import main

main("decode")
