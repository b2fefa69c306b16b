"""τ²-bench's retail domain: orders, returns, exchanges. Read in this order: records, look-ups, writes, the domain.

Each tool checks in the order given and refuses with upstream's words. Three peculiarities are upstream's and kept:
`modify_pending_order_items` gives every changed line the price and options of the *last* new item; a cancellation
refunds *every* entry of the payment history, refunds included; amounts are binary floats, rounded only where said.
"""

import json
from typing import Any, Literal, TypedDict

from domains.tau2 import Domain, World, calculate, conform, transfer_to_human_agents
from tools import ToolError


# ── Records ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Variant(TypedDict):
    item_id: str
    options: dict[str, str]
    available: bool
    price: float


class Product(TypedDict):
    name: str
    product_id: str
    variants: dict[str, Variant]


class Name(TypedDict):
    first_name: str
    last_name: str


class Address(TypedDict):
    address1: str
    address2: str
    city: str
    country: str
    state: str
    zip: str


class CreditCard(TypedDict):
    source: Literal["credit_card"]
    id: str
    brand: str
    last_four: str


class Paypal(TypedDict):
    source: Literal["paypal"]
    id: str


class GiftCard(TypedDict):
    source: Literal["gift_card"]
    id: str
    balance: float


class User(TypedDict):
    user_id: str
    name: Name
    address: Address
    email: str
    payment_methods: dict[str, CreditCard | Paypal | GiftCard]
    orders: list[str]


class Item(TypedDict):
    name: str
    product_id: str
    item_id: str
    price: float
    options: dict[str, str]


class Fulfillment(TypedDict):
    tracking_id: list[str]
    item_ids: list[str]


class Payment(TypedDict):
    transaction_type: Literal["payment", "refund"]
    amount: float
    payment_method_id: str


class Order(TypedDict):
    order_id: str
    user_id: str
    address: Address
    items: list[Item]
    status: Literal[
        "processed",
        "pending",
        "pending (item modified)",
        "delivered",
        "cancelled",
        "exchange requested",
        "return requested",
    ]
    fulfillments: list[Fulfillment]
    payment_history: list[Payment]
    cancel_reason: str | None
    exchange_items: list[str] | None
    exchange_new_items: list[str] | None
    exchange_payment_method_id: str | None
    exchange_price_difference: float | None
    return_items: list[str] | None
    return_payment_method_id: str | None


class Database(TypedDict):
    products: dict[str, Product]
    users: dict[str, User]
    orders: dict[str, Order]


# ── Look-ups ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def find(world: World, table: str, key: Any) -> dict:
    """A row, not to be written to."""
    if (row := world.read(table, key)) is None:
        raise ToolError(f"{table[:-1].capitalize()} not found")
    return row


def find_user_id_by_email(world: World, email: str):
    """Find a user's id by email, whatever its case.
    email: the email address"""
    for key, user in world.rows("users"):
        if user["email"].lower() == email.lower():
            return key
    raise ToolError("User not found")


def find_user_id_by_name_zip(world: World, first_name: str, last_name: str, zip: str):
    """Find a user's id by name, whatever its case, and zip code. Better only if there is no email.
    first_name: first name
    last_name: last name
    zip: zip code of the user's address"""
    for key, user in world.rows("users"):
        name = user["name"]
        if (
            name["first_name"].lower() == first_name.lower()
            and name["last_name"].lower() == last_name.lower()
            and user["address"]["zip"] == zip
        ):
            return key
    raise ToolError("User not found")


def get_order_details(world: World, order_id: str):
    """Status and details of an order.
    order_id: such as #W0000000; the # belongs to it"""
    return find(world, "orders", order_id)


def get_product_details(world: World, product_id: str):
    """A type of product and all its variants.
    product_id: such as 6086499569; not an item's id"""
    return find(world, "products", product_id)


def get_item_details(world: World, item_id: str):
    """One variant of a product.
    item_id: such as 8069050545; not a product's id"""
    for _, product in world.rows("products"):
        if item_id in product["variants"]:
            return product["variants"][item_id]
    raise ToolError("Item not found")


def get_user_details(world: World, user_id: str):
    """A user's profile, payment methods and orders.
    user_id: such as sara_doe_496"""
    return find(world, "users", user_id)


def list_all_product_types(world: World):
    """Names and ids of all types of product; each type has variants with item ids of their own."""
    return json.dumps({p["name"]: p["product_id"] for _, p in world.rows("products")}, sort_keys=True)


# ── Writes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def payment_method(world: World, user_id: str, method_id: Any) -> dict:
    methods = find(world, "users", user_id)["payment_methods"]
    if method_id not in methods:
        raise ToolError("Payment method not found")
    return methods[method_id]


def credit(world: World, user_id: str, method_id: str, amount: float) -> None:
    """Add to the balance if the method is a gift card; other methods keep no balance."""
    if payment_method(world, user_id, method_id)["source"] == "gift_card":
        card = world.edit("users", user_id)["payment_methods"][method_id]
        card["balance"] = round(card["balance"] + amount, 2)


def short_of(method: dict, amount: float) -> bool:
    return method["source"] == "gift_card" and method["balance"] < amount


def payment(kind: str, amount: float, method_id: str) -> dict:
    return conform({"transaction_type": kind, "amount": amount, "payment_method_id": method_id}, Payment)


def first_item(order: dict, item_id: Any) -> dict | None:
    return next((item for item in order["items"] if item["item_id"] == item_id), None)


def check_items(order: dict, item_ids: Any, message: str) -> None:
    """Each id at most as often as the order has it."""
    mine = [item["item_id"] for item in order["items"]]
    for item_id in item_ids:
        if item_ids.count(item_id) > mine.count(item_id):
            raise ToolError(message.format(item_id))


def new_variant(world: World, item: dict, new_id: Any) -> dict:
    """The variant that replaces an item: of the same product, and in stock."""
    variants = find(world, "products", item["product_id"])["variants"]
    if new_id not in variants:
        raise ToolError("Variant not found")
    if not variants[new_id]["available"]:
        raise ToolError(f"New item {new_id} not found or available")
    return variants[new_id]


def cancel_pending_order(world: World, order_id: str, reason: str):
    """Cancel a pending order and refund it: a gift card at once, otherwise in 5 to 7 business days.
    order_id: such as #W0000000
    reason: no longer needed, or ordered by mistake"""
    order = find(world, "orders", order_id)
    if order["status"] != "pending":
        raise ToolError("Non-pending order cannot be cancelled")
    if reason not in {"no longer needed", "ordered by mistake"}:
        raise ToolError("Invalid reason")
    refunds = []
    for entry in order["payment_history"]:
        refunds.append(payment("refund", entry["amount"], entry["payment_method_id"]))
        credit(world, order["user_id"], entry["payment_method_id"], entry["amount"])
    order = world.edit("orders", order_id)
    order["status"], order["cancel_reason"] = "cancelled", reason
    order["payment_history"] += refunds
    return order


def exchange_delivered_order_items(
    world: World, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
):
    """Exchange items of a delivered order for others of the same product type. Once for each order.
    order_id: such as #W0000000
    item_ids: the items to be exchanged; may hold an id more than once
    new_item_ids: what each is exchanged for, in the same order
    payment_method_id: pays or receives the difference; look in the user's profile"""
    order = find(world, "orders", order_id)
    if order["status"] != "delivered":
        raise ToolError("Non-delivered order cannot be exchanged")
    check_items(order, item_ids, "Number of {} not found.")
    if len(item_ids) != len(new_item_ids):
        raise ToolError("The number of items to be exchanged should match.")
    difference = 0
    for item_id, new_id in zip(item_ids, new_item_ids, strict=True):
        item = first_item(order, item_id)
        difference += new_variant(world, item, new_id)["price"] - item["price"]
    difference = round(difference, 2)  # with no items the integer 0, which upstream keeps as it is
    if short_of(payment_method(world, order["user_id"], payment_method_id), difference):
        raise ToolError("Insufficient gift card balance to pay for the price difference")
    order = world.edit("orders", order_id)
    order["status"] = "exchange requested"
    order["exchange_items"], order["exchange_new_items"] = sorted(item_ids), sorted(new_item_ids)
    order["exchange_payment_method_id"] = payment_method_id
    order["exchange_price_difference"] = difference
    return order


def modify_pending_order_items(
    world: World, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
):
    """Replace items of a pending order by others of the same product type. Once for each order.
    order_id: such as #W0000000
    item_ids: the items to be replaced; may hold an id more than once
    new_item_ids: what each is replaced by, in the same order
    payment_method_id: pays or receives the difference; look in the user's profile"""
    order = find(world, "orders", order_id)
    if order["status"] != "pending":
        raise ToolError("Non-pending order cannot be modified")
    check_items(order, item_ids, "{} not found")
    if len(item_ids) != len(new_item_ids):
        raise ToolError("The number of items to be exchanged should match")
    difference, variant = 0, None
    for item_id, new_id in zip(item_ids, new_item_ids, strict=True):
        if item_id == new_id:
            raise ToolError("The new item id should be different from the old item id")
        item = first_item(order, item_id)
        variant = new_variant(world, item, new_id)
        difference += variant["price"] - item["price"]  # not rounded
    if short_of(payment_method(world, order["user_id"], payment_method_id), difference):
        raise ToolError("Insufficient gift card balance to pay for the new item")
    order = world.edit("orders", order_id)
    kind = "payment" if difference > 0 else "refund"
    order["payment_history"].append(payment(kind, abs(difference), payment_method_id))
    credit(world, order["user_id"], payment_method_id, -difference)
    for item_id, new_id in zip(item_ids, new_item_ids, strict=True):
        if (item := first_item(order, item_id)) is None:
            raise ToolError(f"Item {item_id} not found")
        item["item_id"] = new_id
        item["price"], item["options"] = (
            variant["price"],
            variant["options"],
        )  # of the last one, for all: upstream's bug
    order["status"] = "pending (item modified)"
    return order


def modify_pending_order_payment(world: World, order_id: str, payment_method_id: str):
    """Pay a pending order with another method.
    order_id: such as #W0000000
    payment_method_id: the new method; look in the user's profile"""
    order = find(world, "orders", order_id)
    if "pending" not in order["status"]:
        raise ToolError("Non-pending order cannot be modified")
    method, history = payment_method(world, order["user_id"], payment_method_id), order["payment_history"]
    if len(history) != 1 or history[0]["transaction_type"] != "payment":
        raise ToolError("There should be exactly one payment for a pending order")
    old, amount = history[0]["payment_method_id"], history[0]["amount"]
    if old == payment_method_id:
        raise ToolError("The new payment method should be different from the current one")
    if short_of(method, amount):
        raise ToolError("Insufficient gift card balance to pay for the order")
    order = world.edit("orders", order_id)
    order["payment_history"] += [payment("payment", amount, payment_method_id), payment("refund", amount, old)]
    credit(world, order["user_id"], payment_method_id, -amount)
    credit(world, order["user_id"], old, amount)
    return order


def modify_pending_order_address(
    world: World, order_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
):
    """Send a pending order to another address.
    order_id: such as #W0000000
    address1: street and number
    address2: apartment or suite, or an empty string
    city: name of the city
    state: such as CA
    country: such as USA
    zip: zip code"""
    if "pending" not in find(world, "orders", order_id)["status"]:
        raise ToolError("Non-pending order cannot be modified")
    address = new_address(address1, address2, city, country, state, zip)
    world.edit("orders", order_id)["address"] = address
    return find(world, "orders", order_id)


def modify_user_address(
    world: World, user_id: str, address1: str, address2: str, city: str, state: str, country: str, zip: str
):
    """Change a user's default address.
    user_id: such as sara_doe_496
    address1: street and number
    address2: apartment or suite, or an empty string
    city: name of the city
    state: such as CA
    country: such as USA
    zip: zip code"""
    find(world, "users", user_id)
    address = new_address(address1, address2, city, country, state, zip)
    world.edit("users", user_id)["address"] = address
    return find(world, "users", user_id)


def new_address(*parts: Any) -> dict:
    return conform(dict(zip(Address.__annotations__, parts, strict=True)), Address)


def return_delivered_order_items(world: World, order_id: str, item_ids: list[str], payment_method_id: str):
    """Take items of a delivered order back.
    order_id: such as #W0000000
    item_ids: the items; may hold an id more than once
    payment_method_id: the original method, or a gift card"""
    order = find(world, "orders", order_id)
    if order["status"] != "delivered":
        raise ToolError("Non-delivered order cannot be returned")
    method = payment_method(world, order["user_id"], payment_method_id)
    if method["source"] != "gift_card" and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise ToolError("Payment method should be the original payment method")
    check_items(order, item_ids, "Some item not found")
    order = world.edit("orders", order_id)
    order["status"] = "return requested"
    order["return_items"], order["return_payment_method_id"] = sorted(item_ids), payment_method_id
    return order


class Retail(Domain):
    """The domain object (see `tau2.Domain`)."""

    name = "retail"
    database = Database
    reads = (
        find_user_id_by_email,
        find_user_id_by_name_zip,
        get_item_details,
        get_order_details,
        get_product_details,
        get_user_details,
        list_all_product_types,
    )
    writes = (
        cancel_pending_order,
        exchange_delivered_order_items,
        modify_pending_order_address,
        modify_pending_order_items,
        modify_pending_order_payment,
        modify_user_address,
        return_delivered_order_items,
    )
    generic = (calculate, transfer_to_human_agents)
