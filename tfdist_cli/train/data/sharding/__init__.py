"""Shards of the user's datasets: whatever draws an order, the workers divide one order among them."""
