"""``deepspeed.monitor``: the monitors of an engine, for events of the program's own."""
