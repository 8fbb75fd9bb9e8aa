"""The routes of the REST service, in parts.

- `answers`: JSON answers, and the errors of handlers
- `objects`: put, get, exist and remove
- `segments`: contributing and withdrawing memory
"""
