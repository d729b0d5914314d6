"""The server of `redcoast serve`. Its modules import the packages of the extra `serve`."""

from ._extra import require_extra as require_extra
