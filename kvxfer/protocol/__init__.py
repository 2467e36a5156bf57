"""Pure decisions of the control plane: who is a member, who is alive, who may talk to whom. Takes events and
``now_ns``, never does input or output.
"""
