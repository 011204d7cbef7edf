"""The stage report: the verdict, and the files that show it."""
