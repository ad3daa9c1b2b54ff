"""Run the sessions of remotes, and upload to and delete from them."""
