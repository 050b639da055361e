"""A small MCP server over stdio with two tools, for mcp_bridge.py and the tests."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("orders")

ORDERS = {"A-1041": ("shipped", "2026-03-02"), "B-2207": ("waiting for payment", "2026-03-09")}


@server.tool()
def get_order(order_id: str) -> str:
    """Look up an order by its id"""
    if order_id not in ORDERS:
        raise ValueError(f"no order {order_id}")
    status, date = ORDERS[order_id]
    return f'{{"order_id": "{order_id}", "status": "{status}", "date": "{date}"}}'


@server.tool()
def list_orders() -> str:
    """List the ids of all orders"""
    return ", ".join(ORDERS)


if __name__ == "__main__":
    server.run("stdio")
