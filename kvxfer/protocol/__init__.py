"""Pure decisions of the control plane: which agents are members, which are alive, which may talk to which. Takes events
and ``now_ns``, never does input or output."""
