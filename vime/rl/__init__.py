"""The loop that the gates and the scripts run: rollout, reward, advantage, step, weight update."""
