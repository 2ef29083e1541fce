"""Other servers, installed apart and measured with the same work, cores, weights and dtype as this one."""
