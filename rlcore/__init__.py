"""What serving and both kinds of learning share: records, transport, weight store, trainer, engine seams."""
