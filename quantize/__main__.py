"""Runs the command line: `python -m quantize`."""

from quantize.cli import main

main()
