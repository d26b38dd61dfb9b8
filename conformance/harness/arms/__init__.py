"""The arms of the agent experiment: what each sends to the model at every step, what that costs, what it leaves behind."""
