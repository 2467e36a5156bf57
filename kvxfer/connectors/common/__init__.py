"""What connectors of several engines share: the agent's thread, names that both sides compute, messages in order."""
