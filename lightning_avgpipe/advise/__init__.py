"""Should I use this? What a batch of a script takes in other ways to train, predicted."""
