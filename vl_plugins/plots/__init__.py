"""Pictures of training runs and of losses, one kind in each module. Drawing needs the extra ``eval``."""
