"""One child process for each remote."""
