"""The local half of the loss: one rank's hidden states against its rows of the classifier. No communication."""
