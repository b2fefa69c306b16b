"""τ²-bench's telecom domain: an agent with a customer database, a user with a phone. Both have tools.

Read in this order: the agent's records and tools, the phone's records, how a phone behaves (`search_network` to
`status_bar`), the user's tools, `sync`, initialisation, assertions, the domain.

Rows are read in the database's order; the key of a row is its position. Kept peculiarities: `sync` carries the line's
state to the phone but never makes it search for a network, so a resumed line shows no signal before, say, a reboot; the
phone's VPN settings are one record, which stays poor once it is broken. Two things differ from upstream, where they make
runs irreproducible: the id of a new bill is a number counted up and not a random one, and no episode sees another's VPN.
"""

from typing import Any, Literal, TypedDict, get_args

from chat import UserError
from domains.tau2 import Domain, World, conform, read_file, transfer_to_human_agents
from tools import ToolError

TODAY, CYCLE_END = "2025-02-25", "2025-02-28"  # the clock stands still


# ── The agent's records ──────────────────────────────────────────────────────────────────────────────────────────────
class Plan(TypedDict):
    plan_id: str
    name: str
    data_limit_gb: float
    price_per_month: float
    data_refueling_price_per_gb: float


class Address(TypedDict):
    street: str
    city: str
    state: str
    zip_code: str


class PaymentMethod(TypedDict):
    method_type: Literal["Credit Card", "Debit Card", "PayPal"]
    account_number_last_4: str
    expiration_date: str


class Customer(TypedDict):
    customer_id: str
    full_name: str
    date_of_birth: str
    email: str
    phone_number: str
    address: Address
    account_status: Literal["Active", "Suspended", "Pending Verification", "Closed"]
    payment_methods: list[PaymentMethod]
    line_ids: list[str]
    bill_ids: list[str]
    created_at: str
    last_extension_date: str | None
    goodwill_credit_used_this_year: float


class Line(TypedDict):
    line_id: str
    phone_number: str
    status: Literal["Active", "Suspended", "Pending Activation", "Closed"]
    plan_id: str
    device_id: str | None
    data_used_gb: float
    data_refueling_gb: float
    roaming_enabled: bool
    contract_end_date: str | None
    last_plan_change_date: str | None
    last_sim_replacement_date: str | None
    suspension_start_date: str | None


class Charge(TypedDict):
    description: str
    amount: float
    date: str
    item_type: str


class Bill(TypedDict):
    bill_id: str
    customer_id: str
    period_start: str
    period_end: str
    issue_date: str
    total_due: float
    due_date: str
    line_items: list[Charge]
    status: Literal["Draft", "Issued", "Awaiting Payment", "Paid", "Overdue", "Disputed"]


class Device(TypedDict):
    device_id: str
    device_type: Literal["phone", "router", "tablet", "watch", "other"]
    model: str
    imei: str | None
    is_esim_capable: bool
    activated: bool
    activation_date: str | None
    last_esim_transfer_date: str | None


class Database(TypedDict):
    plans: list[Plan]
    customers: list[Customer]
    lines: list[Line]
    bills: list[Bill]
    devices: list[Device]


# ── The agent's tools ────────────────────────────────────────────────────────────────────────────────────────────────
KINDS = {"lines": "Line", "devices": "Device", "bills": "Bill", "customers": "Customer", "plans": "Plan"}


def find(world: World, table: str, id: Any, write: bool = False) -> dict:
    """The first row with an id; to be written to only with `write`."""
    field = f"{KINDS[table].lower()}_id"
    for key, row in world.rows(table):
        if row[field] == id:
            return world.edit(table, key) if write else row
    raise ToolError(f"{KINDS[table]} with ID {id} not found")


def find_line(world: World, customer_id: Any, line_id: Any, write: bool = False) -> dict:
    """A line of a customer."""
    if line_id not in find(world, "customers", customer_id)["line_ids"]:
        raise ToolError(f"Line {line_id} not found for customer {customer_id}")
    return find(world, "lines", line_id, write)


def find_customer_by_phone(world: World, phone_number: Any) -> dict:
    """By the customer's own number or that of one of the lines."""
    for _, customer in world.rows("customers"):
        lines = (find(world, "lines", line_id) for line_id in customer["line_ids"])
        if customer["phone_number"] == phone_number or any(line["phone_number"] == phone_number for line in lines):
            return customer
    raise ToolError(f"Customer with phone number {phone_number} not found")


def shown(row: dict) -> dict:
    """A row as tools print it: times with a space, where the database has a T."""
    times = ("created_at", "activation_date", "last_esim_transfer_date")
    return {k: v.replace("T", " ") if k in times and v else v for k, v in row.items()}


def awaiting_payment(world: World, customer: dict) -> list[dict]:
    bills = [find(world, "bills", bill_id) for bill_id in customer["bill_ids"]]
    return [bill for bill in bills if bill["status"] == "Awaiting Payment"]


def get_customer_by_phone(world: World, phone_number: str):
    """Find a customer by phone number, of the account or of any of its lines.
    phone_number: such as 555-123-2002"""
    return shown(find_customer_by_phone(world, phone_number))


def get_customer_by_id(world: World, customer_id: str):
    """A customer's record.
    customer_id: such as C1001"""
    return shown(find(world, "customers", customer_id))


def get_customer_by_name(world: World, full_name: str, dob: str):
    """Find customers by name, whatever its case, and date of birth; there may be none or several.
    full_name: first and last name
    dob: date of birth, such as 1985-06-15"""
    customers = (row for _, row in world.rows("customers"))
    return [shown(c) for c in customers if c["full_name"].lower() == full_name.lower() and c["date_of_birth"] == dob]


def get_details_by_id(world: World, id: str):
    """Any record by its id.
    id: of a line (L…), device (D…), bill (B…), customer (C…) or plan (P…)"""
    for table, kind in KINDS.items():
        if id.startswith(kind[0]):
            return shown(find(world, table, id))
    raise ToolError(f"Unknown ID format or type: {id}")


def get_bills_for_customer(world: World, customer_id: str, limit: int = 12):
    """A customer's bills, the latest first.
    customer_id: such as C1001
    limit: at most so many"""
    bills = [find(world, "bills", bill_id) for bill_id in find(world, "customers", customer_id)["bill_ids"]]
    return sorted(bills, key=lambda bill: bill["issue_date"], reverse=True)[:limit]


def get_data_usage(world: World, customer_id: str, line_id: str):
    """Data used on a line in this billing cycle, and its limit.
    customer_id: such as C1001
    line_id: such as L1001"""
    line = find_line(world, customer_id, line_id)
    limit = find(world, "plans", line["plan_id"])["data_limit_gb"]
    numbers = {"data_used_gb": line["data_used_gb"], "data_limit_gb": limit}
    numbers["data_refueling_gb"] = line["data_refueling_gb"]
    return {"line_id": line_id} | {k: str(v) for k, v in numbers.items()} | {"cycle_end_date": CYCLE_END}


def suspend_line(world: World, customer_id: str, line_id: str, reason: str):
    """Suspend an active line, for at most 6 months.
    customer_id: such as C1001
    line_id: such as L1001
    reason: why"""
    if find_line(world, customer_id, line_id)["status"] != "Active":
        raise ToolError("Line must be active to suspend")
    line = find_line(world, customer_id, line_id, write=True)
    line["status"], line["suspension_start_date"] = "Suspended", TODAY
    return {"message": "Line suspended successfully. $5/month holding fee will apply.", "line": line}


def resume_line(world: World, customer_id: str, line_id: str):
    """Resume a suspended line.
    customer_id: such as C1001
    line_id: such as L1001"""
    if find_line(world, customer_id, line_id)["status"] not in ("Suspended", "Pending Activation"):
        raise ToolError("Line must be suspended to resume")
    line = find_line(world, customer_id, line_id, write=True)
    line["status"], line["suspension_start_date"] = "Active", None
    return {"message": "Line resumed successfully", "line": line}


def send_payment_request(world: World, customer_id: str, bill_id: str):
    """Ask the customer, on the phone, to pay a bill. One at a time.
    customer_id: such as C1001
    bill_id: such as B1001"""
    customer = find(world, "customers", customer_id)
    if awaiting_payment(world, customer):
        raise ToolError("A bill is already awaiting payment for this customer")
    if bill_id not in customer["bill_ids"]:
        raise ToolError(f"Bill {bill_id} not found for customer {customer_id}")
    find(world, "bills", bill_id, write=True)["status"] = "Awaiting Payment"
    return f"Payment request sent to the customer for bill {bill_id}"


def enable_roaming(world: World, customer_id: str, line_id: str):
    """Allow roaming on a line.
    customer_id: such as C1001
    line_id: such as L1001"""
    return allow_roaming(world, customer_id, line_id, True)


def disable_roaming(world: World, customer_id: str, line_id: str):
    """Forbid roaming on a line.
    customer_id: such as C1001
    line_id: such as L1001"""
    return allow_roaming(world, customer_id, line_id, False)


def allow_roaming(world: World, customer_id: Any, line_id: Any, on: bool) -> str:
    word = "enabled" if on else "disabled"
    if find_line(world, customer_id, line_id)["roaming_enabled"] == on:
        return f"Roaming was already {word}"
    find_line(world, customer_id, line_id, write=True)["roaming_enabled"] = on
    return f"Roaming {word} successfully"


def refuel_data(world: World, customer_id: str, line_id: str, gb_amount: float):
    """Add data to a line for this billing cycle; it is charged to the customer's next bill.
    customer_id: such as C1001
    line_id: such as L1001
    gb_amount: gigabytes, above 0"""
    line = find_line(world, customer_id, line_id)
    if gb_amount <= 0:
        raise ToolError("Refuel amount must be positive")
    price = find(world, "plans", line["plan_id"])["data_refueling_price_per_gb"]
    charge = gb_amount * price
    line = find_line(world, customer_id, line_id, write=True)
    line["data_refueling_gb"] += gb_amount
    charge_next_bill(world, customer_id, f"Data refueling: {gb_amount} GB at ${price}/GB", charge)
    return {
        "message": f"Successfully added {gb_amount} GB of data for line {line_id} for ${charge:.2f}",
        "new_data_refueling_gb": str(line["data_refueling_gb"]),
        "charge": str(charge),
    }


def charge_next_bill(world: World, customer_id: str, description: str, amount: float) -> None:
    """Add to the customer's first draft bill; without one, to a new one."""
    bill_ids = find(world, "customers", customer_id)["bill_ids"]
    bill_id = next((i for i in bill_ids if find(world, "bills", i)["status"] == "Draft"), None)
    if bill_id is None:
        counters = world.edit("hidden", "counters")
        counters["bills"] += 1
        bill_id = f"B{counters['bills']:08x}"
        add_bill(world, customer_id, bill_id, ("2025-03-01", "2025-03-31", "2025-03-01", "2025-03-15"), "Draft")
    bill = find(world, "bills", bill_id, write=True)
    item = {"description": description, "amount": amount, "date": TODAY, "item_type": "Charge"}
    bill["line_items"].append(conform(item, Charge))
    bill["total_due"] += amount


def add_bill(world: World, customer_id: str, bill_id: str, dates: tuple[str, str, str, str], status: str) -> None:
    """dates: period_start, period_end, issue_date, due_date."""
    names = ("period_start", "period_end", "issue_date", "due_date")
    bill = dict(zip(names, dates, strict=True)) | {"bill_id": bill_id, "customer_id": customer_id, "status": status}
    position = sum(1 for _ in world.rows("bills"))
    world.written["bills", position] = conform(bill | {"total_due": 0.0, "line_items": []}, Bill)
    find(world, "customers", customer_id, write=True)["bill_ids"].append(bill_id)


# ── The phone's records ──────────────────────────────────────────────────────────────────────────────────────────────
Signal = Literal["none", "poor", "fair", "good", "excellent"]
Technology = Literal["none", "2G", "3G", "4G", "5G"]
Mode = Literal["4g_5g_preferred", "4g_only", "3g_only", "2g_only"]


class Apn(TypedDict, total=False):
    """The access point's settings. Without an MMSC URL the phone sends no picture messages."""

    apn_name: Literal["internet", "broken"]
    reset_at_reboot: bool
    mms_apn: str | None
    mmsc_url: str | None
    mms_proxy: str | None
    mms_port: int | None


class Vpn(TypedDict):
    server_address: str
    protocol: str
    server_performance: Literal["unknown", "poor", "fair", "good", "excellent"]


class Permissions(TypedDict):
    sms: bool
    storage: bool
    phone: bool
    network: bool


class App(TypedDict):
    app_name: str
    permissions: Permissions


class Phone(TypedDict):
    sim_card_status: Literal["active", "missing", "locked_pin", "locked_puk"]
    sim_card_missing: bool
    airplane_mode: bool
    network_signal_strength: Signal
    network_technology_connected: Technology
    network_connection_status: Literal["connected", "searching", "no_service", "emergency_only"]
    battery_level: int
    data_enabled: bool
    roaming_enabled: bool
    network_mode_preference: Mode
    active_apn_settings: Apn
    wifi_enabled: bool
    wifi_connected: bool
    wifi_ssid: str | None
    wifi_signal_strength: Signal
    wifi_calling_enabled: bool
    wifi_calling_mms_over_wifi: bool
    data_saver_mode: bool
    vpn_enabled_setting: bool
    vpn_connected: bool
    vpn_details: Vpn | None
    app_statuses: dict[str, App]


class PaymentRequest(TypedDict):
    bill_id: str
    amount_due: float
    paid: bool


class Surroundings(TypedDict):
    """What is around the phone, and what the carrier allows: the agent's side, as far as the phone notices it."""

    name: str | None
    phone_number: str | None
    is_abroad: bool
    roaming_allowed: bool
    signal_strength: dict[str, Signal]
    mobile_data_usage_exceeded: bool
    line_active: bool
    payment_request: PaymentRequest | None


class UserDatabase(TypedDict):
    device: Phone
    surroundings: Surroundings


APN_DEFAULTS = {
    "apn_name": "internet",
    "reset_at_reboot": False,
    "mms_apn": "mms",
    "mmsc_url": "http://mms.carrier.com/mms/wapenc",
    "mms_proxy": None,
    "mms_port": None,
}
PHONE_DEFAULTS = {"battery_level": 80, "active_apn_settings": {}}
SURROUNDINGS_DEFAULTS = {
    "is_abroad": False,
    "roaming_allowed": False,
    "signal_strength": {"2G": "poor", "3G": "fair", "4G": "good", "5G": "excellent"},
    "mobile_data_usage_exceeded": False,
    "line_active": True,
}
VPN_DEFAULTS = {"server_address": "192.168.1.1", "protocol": "OpenVPN", "server_performance": "excellent"}


# ── How the phone behaves ────────────────────────────────────────────────────────────────────────────────────────────
def phone(world: World, write: bool = False) -> dict:
    """The phone's row; to be written to only with `write`."""
    return world.edit("user", "device") if write else world.read("user", "device")


def around(world: World, write: bool = False) -> dict:
    """The row of what is around the phone."""
    return world.edit("user", "surroundings") if write else world.read("user", "surroundings")


def sim_state(device: dict) -> str:
    return "missing" if device["sim_card_missing"] else device["sim_card_status"]


def search_network(world: World) -> None:
    """Connect as SIM card, preferred mode and surroundings allow."""
    device, place = phone(world, write=True), around(world)
    strength = place["signal_strength"]
    technology, signal, status = "none", "none", "no_service"
    usable = not device["airplane_mode"] and device["active_apn_settings"]["apn_name"] != "broken"
    if sim_state(device) == "active" and usable and place["line_active"]:
        status, mode = "connected", device["network_mode_preference"]
        technology = "5G" if mode == "4g_5g_preferred" else mode[:2].upper()
        if mode == "4g_5g_preferred" and strength.get("5G", "none") == "none":
            technology = "4G"
        signal = strength.get(technology, "none")
    device["network_connection_status"] = status
    device["network_technology_connected"], device["network_signal_strength"] = technology, signal


def data_works(world: World) -> bool:
    device, place = phone(world), around(world)
    may_roam = device["roaming_enabled"] and place["roaming_allowed"]
    return (
        not device["airplane_mode"]
        and device["network_signal_strength"] != "none"
        and device["network_connection_status"] != "no_service"
        and (not place["is_abroad"] or may_roam)
        and device["data_enabled"]
        and not place["mobile_data_usage_exceeded"]
    )


RANGES = {"none": (0, 0), "2G": (0.1, 0.4), "3G": (1, 5), "4G": (10, 100), "5G": (50, 500)}  # Mbps
QUALITY = {"none": 0, "poor": 0.2, "fair": 0.5, "good": 0.8, "excellent": 1}
GRADES = (  # below so many Mbps, what it is called, what it is good for
    (1, "Very Poor", "Connection is very slow. Basic web browsing might be difficult."),
    (5, "Poor", "Connection is slow. Web browsing may be sluggish, streaming difficult."),
    (25, "Fair", "Connection is okay for web browsing and some standard definition streaming."),
    (100, "Good", "Connection is good for most activities, including HD streaming."),
    (float("inf"), "Excellent", "Connection is very fast."),
)


def speed(world: World) -> tuple[float, str, str]:
    """(Mbps, grade, advice) of mobile data; (0, "No Connection", "") if it does not work."""
    if not data_works(world):
        return 0.0, "No Connection", ""
    device = phone(world)
    poor_vpn = device["vpn_connected"] and (device["vpn_details"] or {}).get("server_performance") == "poor"
    factor = (0.1 if poor_vpn else 1.0) * (0.2 if device["data_saver_mode"] else 1.0)
    low, high = RANGES[device["network_technology_connected"]]
    mbps = round((low + high) / 2 * QUALITY[device["network_signal_strength"]] * factor, 2)
    return mbps, *next((grade, advice) for limit, grade, advice in GRADES if mbps < limit)


def mms_works(world: World) -> bool:
    device = phone(world)
    permissions = device["app_statuses"].get("messaging", {}).get("permissions", {})
    return (
        data_works(world)
        and device["network_technology_connected"] != "2G"
        and not (device["wifi_calling_enabled"] and device["wifi_calling_mms_over_wifi"])
        and device["active_apn_settings"]["mmsc_url"] is not None
        and bool(permissions.get("storage") and permissions.get("sms"))
    )


SIGNS = {
    "none": "📵 No Signal",
    "poor": "📶¹ Poor",
    "fair": "📶² Fair",
    "good": "📶³ Good",
    "excellent": "📶⁴ Excellent",
}


def status_bar(world: World) -> str:
    device = phone(world)
    technology = device["network_technology_connected"]
    if device["airplane_mode"]:
        signs = ["✈️ Airplane Mode"]
    else:
        signs = [SIGNS[device["network_signal_strength"]]] + [technology] * (technology != "none")
        if device["data_enabled"] and technology != "none":
            signs += ["📱 Data Enabled"] + ["🔽 Data Saver"] * device["data_saver_mode"]
        else:
            signs.append("📵 Data Disabled")
    if device["wifi_enabled"] and device["wifi_connected"]:
        signs.append(f"📡 Connected to {device['wifi_ssid']}" if device["wifi_ssid"] else "📡 Enabled")
    signs += ["🔒 VPN Connected"] * device["vpn_connected"] + [f"🔋 {device['battery_level']}%"]
    return "Status Bar: " + " | ".join(signs)


# ── The user's tools ─────────────────────────────────────────────────────────────────────────────────────────────────
def on_off(flag: bool) -> str:
    return "ON" if flag else "OFF"


def yes_no(flag: bool) -> str:
    return "Yes" if flag else "No"


def toggle(world: World, field: str, name: str, search: bool = False) -> str:
    """Flip a setting of the phone → what the phone says."""
    device = phone(world, write=True)
    device[field] = not device[field]
    if search:
        search_network(world)
    return f"{name} is now {on_off(device[field])}.\n{status_bar(world)}"


def drop_wifi(device: dict) -> None:
    device["wifi_connected"], device["wifi_ssid"], device["wifi_signal_strength"] = False, None, "none"


def drop_vpn(device: dict) -> None:
    device["vpn_connected"], device["vpn_details"] = False, None


def check_status_bar(world: World):
    """What the status bar at the top of the phone shows."""
    return status_bar(world)


def check_network_status(world: World):
    """Airplane mode, SIM card, signal, mobile data and Wi-Fi of the phone."""
    device = phone(world)
    lines = [
        f"Airplane Mode: {on_off(device['airplane_mode'])}",
        f"SIM Card Status: {sim_state(device)}",
        f"Cellular Connection: {device['network_connection_status']}",
        f"Cellular Signal: {device['network_signal_strength']}",
        f"Cellular Network Type: {device['network_technology_connected']}",
        f"Mobile Data Enabled: {yes_no(device['data_enabled'])}",
        f"Data Roaming Enabled: {yes_no(device['roaming_enabled'])}",
        f"Wi-Fi Radio: {on_off(device['wifi_enabled'])}",
        f"Wi-Fi Connected: {yes_no(device['wifi_connected'])}",
    ]
    return "\n".join(lines + [f"Connected Wi-Fi Network: {device['wifi_ssid']}"] * device["wifi_connected"])


def check_network_mode_preference(world: World):
    """Which kind of network the phone prefers."""
    return f"Network Mode Preference: {phone(world)['network_mode_preference']}"


def set_network_mode_preference(world: World, mode: Mode):
    """Choose which kind of network the phone prefers.
    mode: the kind of network"""
    modes = get_args(Mode)
    if mode not in modes:
        return (
            f"Failed to set network mode: '{mode}' is not a valid option. Please use one of: {', '.join(modes)}"
            f"\n{status_bar(world)}"
        )
    phone(world, write=True)["network_mode_preference"] = mode
    search_network(world)
    return f"Preferred Network Mode set to: {mode}\n{status_bar(world)}"


def run_speed_test(world: World):
    """Measure the speed of mobile data."""
    mbps, grade, advice = speed(world)
    if grade == "No Connection":
        return "Speed test failed: No Connection."
    return f"Speed Test Result: {mbps:.2f} Mbps ({grade}). {advice}"


def toggle_airplane_mode(world: World):
    """Turn airplane mode on or off. On, it cuts every connection."""
    device = phone(world, write=True)
    going_on = not device["airplane_mode"]
    if going_on:
        drop_wifi(device)
        if device["vpn_connected"]:
            drop_vpn(device)
    elif device["wifi_enabled"]:
        drop_wifi(device)
    return toggle(world, "airplane_mode", "Airplane Mode", search=True)


def check_sim_status(world: World):
    """Whether the SIM card works."""
    return {
        "active": "Your SIM card is active and working.",
        "missing": "No SIM card detected in the phone.",
        "locked_pin": "The SIM card is locked with a PIN code.",
        "locked_puk": "The SIM card is locked with a PUK code.",
    }[sim_state(phone(world))]


def reseat_sim_card(world: World):
    """Take the SIM card out and put it in again."""
    phone(world, write=True)["sim_card_missing"] = False
    search_network(world)
    return f"SIM card re-seated successfully.\n{status_bar(world)}"


def toggle_data(world: World):
    """Turn mobile data on or off."""
    return toggle(world, "data_enabled", "Mobile Data", search=True)


def toggle_roaming(world: World):
    """Turn data roaming on or off."""
    return toggle(world, "roaming_enabled", "Data Roaming", search=True)


def check_data_restriction_status(world: World):
    """Whether data saver mode limits data usage."""
    on = phone(world)["data_saver_mode"]
    return "Data Saver mode is ON (limits data usage)." if on else "Data Saver mode is OFF."


def toggle_data_saver_mode(world: World):
    """Turn data saver mode on or off."""
    return toggle(world, "data_saver_mode", "Data Saver Mode")


def check_apn_settings(world: World):
    """The access point (APN) settings of the phone."""
    apn = phone(world)["active_apn_settings"]
    return (
        f"Current APN Name: {apn['apn_name']}\nMMSC URL (for picture messages): {apn['mmsc_url'] or 'Not Set'}\n"
        "(These are technical settings, usually best left unchanged.)"
    )


def set_apn_settings(world: World, apn_settings: Apn):
    """Replace the access point (APN) settings of the phone.
    apn_settings: what is not given takes its default"""
    if unknown := apn_settings.keys() - APN_DEFAULTS.keys():
        raise ToolError(f"no such setting: {', '.join(sorted(unknown))}")
    apn = conform(APN_DEFAULTS | apn_settings, Apn)
    phone(world, write=True)["active_apn_settings"] = apn
    search_network(world)
    return f"APN settings set to: {apn['apn_name']}\n{status_bar(world)}"


def reset_apn_settings(world: World):
    """Bring the access point (APN) settings back to their defaults at the next reboot."""
    phone(world, write=True)["active_apn_settings"]["reset_at_reboot"] = True
    search_network(world)
    return f"APN settings will reset at reboot.\n{status_bar(world)}"


def check_wifi_status(world: World):
    """Whether Wi-Fi is on and connected."""
    device = phone(world)
    if not device["wifi_enabled"]:
        return "Wi-Fi is turned OFF."
    if not device["wifi_connected"]:
        return "Wi-Fi is ON but not connected to any network."
    return f"Wi-Fi is ON and connected to '{device['wifi_ssid']}'. Signal strength: {device['wifi_signal_strength']}."


def toggle_wifi(world: World):
    """Turn Wi-Fi on or off."""
    device = phone(world, write=True)
    if device["airplane_mode"]:
        return f"Cannot change Wi-Fi settings while Airplane Mode is ON.\n{status_bar(world)}"
    if device["wifi_enabled"]:
        drop_wifi(device)
    return toggle(world, "wifi_enabled", "Wi-Fi")


def check_wifi_calling_status(world: World):
    """Whether Wi-Fi calling is on."""
    return f"Wi-Fi Calling is currently turned {on_off(phone(world)['wifi_calling_enabled'])}."


def toggle_wifi_calling(world: World):
    """Turn Wi-Fi calling on or off."""
    return toggle(world, "wifi_calling_enabled", "Wi-Fi Calling")


def check_vpn_status(world: World):
    """Whether a VPN is connected, and which."""
    device = phone(world)
    if not device["vpn_connected"]:
        on = device["vpn_enabled_setting"]
        return "VPN is turned ON in settings, but currently not connected." if on else "VPN is turned OFF."
    if (vpn := device["vpn_details"]) is None:
        return "VPN is ON and connected (no specific details available)."
    grade = vpn["server_performance"]
    return (  # as Python prints upstream's record
        f"VPN is ON and connected. Details: {{'server_address': {vpn['server_address']!r}, 'protocol': "
        f"{vpn['protocol']!r}, 'server_performance': <PerformanceLevel.{grade.upper()}: {grade!r}>}}"
    )


def connect_vpn(world: World):
    """Connect the VPN."""
    device = phone(world, write=True)
    if device["vpn_connected"]:
        return "VPN already connected."
    device["vpn_connected"], device["vpn_details"] = True, dict(world.read("hidden", "vpn"))
    return f"VPN connected successfully.\n{status_bar(world)}"


def disconnect_vpn(world: World):
    """Disconnect the VPN."""
    device = phone(world, write=True)
    if not device["vpn_connected"]:
        return f"No active VPN connection to disconnect.\n{status_bar(world)}"
    drop_vpn(device)
    return f"VPN disconnected successfully.\n{status_bar(world)}"


def check_installed_apps(world: World):
    """Which apps the phone has."""
    return f"The following apps are installed on the phone: {', '.join(phone(world)['app_statuses'])}"


def granted(world: World, app_name: str) -> list[str] | None:
    """The permissions an app has; None if there is no such app."""
    app = phone(world)["app_statuses"].get(app_name)
    return None if app is None else [name for name, given in app["permissions"].items() if given]


def check_app_status(world: World, app_name: str):
    """An app's state and permissions, as a list.
    app_name: such as messaging"""
    if (names := granted(world, app_name)) is None:
        return f"App '{app_name}' not found on this phone."
    lines = (
        [" - Permissions Granted:", *(f"   - {name}" for name in names)] if names else [" - Permissions: None granted."]
    )
    return "\n".join([f"Status for App: {app_name}", *lines])


def check_app_permissions(world: World, app_name: str):
    """Which permissions an app has.
    app_name: such as messaging"""
    if (names := granted(world, app_name)) is None:
        return f"App '{app_name}' not found on this phone."
    if not names:
        return f"App '{app_name}' currently has no permissions granted."
    return f"App '{app_name}' has permission for: {', '.join(names)}."


def grant_app_permission(world: World, app_name: str, permission: str):
    """Give an app a permission.
    app_name: such as messaging
    permission: sms, storage, phone or network"""
    permission, app = permission.lower(), phone(world, write=True)["app_statuses"].get(app_name)
    if app is None:
        text = f"Error. App '{app_name}' not found. Cannot grant permission."
    elif permission not in app["permissions"]:
        names = list(app["permissions"])
        text = f"Error. Permission '{permission}' not tracked for app '{app_name}', available permissions: {names}"
    else:
        app["permissions"][permission] = True
        text = f"Success. Permission '{permission}' granted to app '{app_name}'."
    return f"{text}\n{status_bar(world)}"


def can_send_mms(world: World):
    """Whether the messaging app can send picture messages."""
    return f"Your messaging app {'can' if mms_works(world) else 'cannot'} send MMS messages."


def reboot_device(world: World):
    """Restart the phone."""
    device, lines = phone(world, write=True), []
    if device["active_apn_settings"]["reset_at_reboot"]:
        lines.append("Resetting APN settings...")
        device["active_apn_settings"] = dict(APN_DEFAULTS)
    search_network(world)
    return "\n".join([*lines, "Restarting network services...", status_bar(world)])


def check_payment_request(world: World):
    """Whether a bill is to be paid."""
    if (request := around(world)["payment_request"]) is None:
        return "No payment request has been made."
    return f"You have a payment request for bill {request['bill_id']} of {request['amount_due']} USD."


def make_payment(world: World):
    """Pay the bill that payment was asked for."""
    if (request := around(world, write=True)["payment_request"]) is None:
        return "You do not have a payment request."
    request["paid"] = True
    return f"Payment of {request['amount_due']} USD has been made for bill {request['bill_id']}."


# ── Both sides in step ───────────────────────────────────────────────────────────────────────────────────────────────
def sync(world: World) -> None:
    """Carry the line's state to the phone, settle a payment, and show the next bill that awaits one."""
    if (number := around(world)["phone_number"]) is None:
        return
    line = next((row for _, row in world.rows("lines") if row["phone_number"] == number), None)
    if line is None:
        raise ToolError(f"Line with phone number {number} not found")
    plan = find(world, "plans", line["plan_id"])
    place = around(world, write=True)
    place["line_active"] = line["status"] == "Active"
    place["roaming_allowed"] = line["roaming_enabled"]
    limit = plan["data_limit_gb"] + line["data_refueling_gb"]
    place["mobile_data_usage_exceeded"] = line["data_used_gb"] >= limit
    if (request := place["payment_request"]) and request["paid"]:
        find(world, "bills", request["bill_id"], write=True)["status"] = "Paid"
        place["payment_request"] = None
    if place["payment_request"] is None and (bills := awaiting_payment(world, find_customer_by_phone(world, number))):
        request = {"bill_id": bills[0]["bill_id"], "amount_due": bills[0]["total_due"], "paid": False}
        place["payment_request"] = request


# ── Initialisation: how a task's trouble comes about ─────────────────────────────────────────────────────────────────
def set_user_info(world: World, name: str, phone_number: str) -> None:
    around(world, write=True).update(name=name, phone_number=phone_number)


def set_user_location(world: World, abroad: bool) -> None:
    around(world, write=True)["is_abroad"] = abroad


def turn(world: World, tool: Any, field: str, on: bool) -> None:
    """Toggle until a setting is as wanted. Airplane mode that is on already so goes off and on, and drops the VPN."""
    tool(world)
    if phone(world)[field] != on:
        tool(world)


def turn_data_on(world: World) -> None:
    phone(world, write=True)["data_enabled"] = True


def unseat_sim_card(world: World) -> None:
    phone(world, write=True)["sim_card_missing"] = True
    search_network(world)


def lock_sim_card(world: World, mode: Literal["pin", "puk"]) -> None:
    phone(world, write=True)["sim_card_status"] = {"pin": "locked_pin", "puk": "locked_puk"}[mode]
    search_network(world)


def break_apn_settings(world: World) -> None:
    phone(world, write=True)["active_apn_settings"]["apn_name"] = "broken"
    search_network(world)


def break_apn_mms_setting(world: World) -> None:
    phone(world, write=True)["active_apn_settings"]["mmsc_url"] = None


def set_wifi_calling(world: World, enabled: bool, mms_over_wifi: bool | None = None) -> None:
    device = phone(world, write=True)
    device["wifi_calling_enabled"] = enabled
    if mms_over_wifi is not None:
        device["wifi_calling_mms_over_wifi"] = mms_over_wifi


def break_vpn(world: World) -> None:
    connect_vpn(world)
    for vpn in (phone(world, write=True)["vpn_details"], world.edit("hidden", "vpn")):
        vpn["server_performance"] = "poor"


def remove_app_permission(world: World, app_name: str, permission: str) -> None:
    app = phone(world, write=True)["app_statuses"].get(app_name, {"permissions": {}})
    if permission.lower() in app["permissions"]:
        app["permissions"][permission.lower()] = False


def set_data_usage(world: World, customer_id: str, line_id: str, data_used_gb: float) -> None:
    find_line(world, customer_id, line_id, write=True)["data_used_gb"] = data_used_gb


def suspend_line_for_overdue_bill(
    world: World, customer_id: str, line_id: str, new_bill_id: str, contract_ended: bool
) -> None:
    line = find_line(world, customer_id, line_id)
    if line["status"] != "Active":
        raise ToolError("Line must be active to suspend for unpaid bill")
    amount = find(world, "plans", line["plan_id"])["price_per_month"]
    customer = find(world, "customers", customer_id)
    if any(find(world, "bills", bill_id)["status"] == "Overdue" for bill_id in customer["bill_ids"]):
        raise ToolError("Customer already has an overdue bill")
    add_bill(world, customer_id, new_bill_id, ("2025-01-01", "2025-01-31", "2025-01-01", "2025-01-15"), "Overdue")
    bill = find(world, "bills", new_bill_id, write=True)
    item = {"description": f"Charge for line {line_id}", "amount": amount, "date": TODAY, "item_type": "Charge"}
    bill["line_items"], bill["total_due"] = [item], amount
    line = find_line(world, customer_id, line_id, write=True)
    line["status"], line["suspension_start_date"] = "Suspended", TODAY
    if contract_ended:
        line["contract_end_date"] = "2025-01-31"


SET_UP = {
    "turn_airplane_mode_on": lambda world: turn(world, toggle_airplane_mode, "airplane_mode", True),
    "turn_airplane_mode_off": lambda world: turn(world, toggle_airplane_mode, "airplane_mode", False),
    "turn_data_off": lambda world: turn(world, toggle_data, "data_enabled", False),
    "turn_roaming_on": lambda world: turn(world, toggle_roaming, "roaming_enabled", True),
    "turn_roaming_off": lambda world: turn(world, toggle_roaming, "roaming_enabled", False),
    "turn_data_saver_mode_on": lambda world: turn(world, toggle_data_saver_mode, "data_saver_mode", True),
    "turn_data_saver_mode_off": lambda world: turn(world, toggle_data_saver_mode, "data_saver_mode", False),
    "simulate_network_search": search_network,
} | {
    function.__name__: function
    for function in (
        set_user_info,
        set_user_location,
        turn_data_on,
        unseat_sim_card,
        lock_sim_card,
        break_apn_settings,
        break_apn_mms_setting,
        set_wifi_calling,
        break_vpn,
        remove_app_permission,
        set_data_usage,
        suspend_line_for_overdue_bill,
    )
}


# ── Assertions: what must hold at the end ────────────────────────────────────────────────────────────────────────────
def internet_speed(world: World, expected_speed: float, expected_desc: str | None = None) -> bool:
    mbps, grade, _ = speed(world)
    return mbps >= expected_speed and (expected_desc is None or grade.lower() == expected_desc.lower())


def refueled(world: World, customer_id: str, line_id: str, expected_amount: float) -> bool:
    return abs(find_line(world, customer_id, line_id)["data_refueling_gb"] - expected_amount) < 1e-6


def bill_status(world: World, bill_id: str) -> str | None:
    return next((bill["status"] for _, bill in world.rows("bills") if bill["bill_id"] == bill_id), None)


def setting_is(field: str) -> Any:
    return lambda world, expected_status: phone(world)[field] == expected_status


ASSERTIONS = {
    "assert_airplane_mode_status": setting_is("airplane_mode"),
    "assert_mobile_roaming_status": setting_is("roaming_enabled"),
    "assert_mobile_data_saver_mode_status": setting_is("data_saver_mode"),
    "assert_service_status": setting_is("network_connection_status"),
    "assert_mobile_data_usage_exceeded": lambda world, expected_status: (
        around(world)["mobile_data_usage_exceeded"] == expected_status
    ),
    "assert_mobile_data_status": lambda world, expected_status: data_works(world) == expected_status,
    "assert_can_send_mms": lambda world, expected_status: mms_works(world) == expected_status,
    "assert_internet_speed": internet_speed,
    "assert_internet_not_excellent": lambda world: speed(world)[1] != "Excellent",
    "assert_data_refueling_amount": refueled,
    "assert_line_status": lambda world, customer_id, line_id, expected_status: (
        find_line(world, customer_id, line_id)["status"] == expected_status
    ),
    "assert_overdue_bill_exists": lambda world, overdue_bill_id: bill_status(world, overdue_bill_id) == "Overdue",
    "assert_no_overdue_bill": lambda world, overdue_bill_id: bill_status(world, overdue_bill_id) in (None, "Paid"),
}


class Telecom(Domain):
    """The domain object (see `tau2.Domain`)."""

    name = "telecom"
    database = Database
    hidden = ("hidden",)
    paper_split = False
    reads = (
        get_bills_for_customer,
        get_customer_by_id,
        get_customer_by_name,
        get_customer_by_phone,
        get_data_usage,
        get_details_by_id,
    )
    writes = (disable_roaming, enable_roaming, refuel_data, resume_line, send_payment_request, suspend_line)
    generic = (transfer_to_human_agents,)
    user_reads = (
        can_send_mms,
        check_apn_settings,
        check_app_permissions,
        check_app_status,
        check_data_restriction_status,
        check_installed_apps,
        check_network_mode_preference,
        check_network_status,
        check_payment_request,
        check_sim_status,
        check_status_bar,
        check_vpn_status,
        check_wifi_calling_status,
        check_wifi_status,
        run_speed_test,
    )
    user_writes = (
        connect_vpn,
        disconnect_vpn,
        grant_app_permission,
        make_payment,
        reboot_device,
        reseat_sim_card,
        reset_apn_settings,
        set_apn_settings,
        set_network_mode_preference,
        toggle_airplane_mode,
        toggle_data,
        toggle_data_saver_mode,
        toggle_roaming,
        toggle_wifi,
        toggle_wifi_calling,
    )

    def load(self) -> dict[str, dict[Any, Any]]:
        """The agent's tables with a row's position as its key, "user" with the phone and what is around it, and "hidden"."""
        agent = conform(read_file(self.folder / "db.toml", self.folder / "db.json"), Database)
        user = read_file(self.folder / "user_db.toml", self.folder / "user_db.json")
        device = PHONE_DEFAULTS | user["device"]
        device["active_apn_settings"] = APN_DEFAULTS | device["active_apn_settings"]
        surroundings = SURROUNDINGS_DEFAULTS | user.get("surroundings", {})
        return {table: dict(enumerate(rows)) for table, rows in agent.items()} | {
            "user": conform({"device": device, "surroundings": surroundings}, UserDatabase),
            "hidden": {"vpn": VPN_DEFAULTS, "counters": {"bills": 0}},
        }

    def read_policy(self) -> str:
        main, support = (read_file(self.folder / f"{name}.md") for name in ("main_policy", "tech_support_manual"))
        return f"<main_policy>\n{main}\n</main_policy>\n<tech_support_policy>\n{support}\n</tech_support_policy>"

    def sync(self, world: World) -> None:
        sync(world)

    def set_up(self, world: World, action: dict) -> None:
        name = action["func_name"]
        function = SET_UP[name] if name in SET_UP else self.tool(action["env_type"], name)
        function(world, **action["arguments"])
        sync(world)

    def holds(self, world: World, assertion: dict) -> bool:
        name = assertion["func_name"]
        if name not in ASSERTIONS:
            raise UserError(f"telecom has no assertion {name}; it has {', '.join(ASSERTIONS)}")
        return ASSERTIONS[name](world, **assertion["arguments"]) == assertion.get("assert_value", True)
