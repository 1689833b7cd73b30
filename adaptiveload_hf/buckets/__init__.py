"""The data half: shapes, cost, plan, schedule, sampler. Never imports `adaln`."""
