"""A fake prefill, see fake_role."""

from fake_role import main

main("prefill")
