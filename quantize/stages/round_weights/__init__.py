"""The stage round: chooses codes and scales by GPTQ."""
