"""The stage round: codes and scales by GPTQ."""
