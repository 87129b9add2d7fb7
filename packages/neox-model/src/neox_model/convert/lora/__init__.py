"""Low-rank adapters of ours and of PEFT."""
