"""Steps of workers of one host that update the parameters together, in the memory of the ps."""
