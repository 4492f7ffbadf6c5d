"""The web server: listening, access control, and limits on requests.

serve    listen, open a browser, serve until interrupted
guard    tokens, host names, security headers
bodies   rejects bodies that are too large or match no callback
"""
