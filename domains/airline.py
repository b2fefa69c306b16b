"""τ²-bench's airline domain: reservations, flights, certificates. Read in this order: records, look-ups, writes, the domain.

Each tool checks in the order given and refuses with upstream's words. What upstream does not check is not checked here:
allowances of free bags, whether legs connect, whether a cancellation is allowed. Policy is the agent's to keep. Kept
peculiarities: a certificate is used up whole; cancelling gives no seat and no balance back; the second leg of a one-stop
search compares times as text, "+1" included, and writes the next day without a leading zero (so it never matches before
the 10th); bag counts and the cabin of a changed reservation are stored as given.
"""

from copy import deepcopy
from typing import Any, Literal, TypedDict

from domains.tau2 import Domain, World, calculate, conform, transfer_to_human_agents
from tools import ToolError

NOW = "2024-05-15T15:00:00"  # the clock stands still
AIRPORTS = """SFO San Francisco, JFK New York, LAX Los Angeles, ORD Chicago, DFW Dallas, DEN Denver, SEA Seattle, ATL Atlanta,
MIA Miami, BOS Boston, PHX Phoenix, IAH Houston, LAS Las Vegas, MCO Orlando, EWR Newark, CLT Charlotte, MSP Minneapolis,
DTW Detroit, PHL Philadelphia, LGA LaGuardia"""


# ── Records ──────────────────────────────────────────────────────────────────────────────────────────────────────────
Cabin = Literal["business", "economy", "basic_economy"]
FlightType = Literal["round_trip", "one_way"]
Insurance = Literal["yes", "no"]


class Available(TypedDict):
    status: Literal["available"]
    available_seats: dict[str, int]
    prices: dict[str, int]


class Landed(TypedDict):
    status: Literal["landed"]
    actual_departure_time_est: str
    actual_arrival_time_est: str


class Cancelled(TypedDict):
    status: Literal["cancelled"]


class Expected(TypedDict):
    status: Literal["delayed", "on time"]
    estimated_departure_time_est: str
    estimated_arrival_time_est: str


class Flying(TypedDict):
    status: Literal["flying"]
    actual_departure_time_est: str
    estimated_arrival_time_est: str


class Flight(TypedDict):
    flight_number: str
    origin: str
    destination: str
    scheduled_departure_time_est: str
    scheduled_arrival_time_est: str  # "+1" at the end: the next day
    dates: dict[str, Available | Landed | Cancelled | Expected | Flying]


class Name(TypedDict):
    first_name: str
    last_name: str


class Address(TypedDict):
    address1: str
    address2: str | None
    city: str
    country: str
    state: str
    zip: str


class CreditCard(TypedDict):
    source: Literal["credit_card"]
    id: str
    brand: str
    last_four: str


class Balance(TypedDict):
    source: Literal["gift_card", "certificate"]
    id: str
    amount: float


class Passenger(TypedDict):
    first_name: str
    last_name: str
    dob: str


class User(TypedDict):
    user_id: str
    name: Name
    address: Address
    email: str
    dob: str
    payment_methods: dict[str, CreditCard | Balance]
    saved_passengers: list[Passenger]
    membership: Literal["gold", "silver", "regular"]
    reservations: list[str]


class Leg(TypedDict):
    flight_number: str
    origin: str
    destination: str
    date: str
    price: int


class Payment(TypedDict):
    payment_id: str
    amount: int


class Reservation(TypedDict):
    reservation_id: str
    user_id: str
    origin: str
    destination: str
    flight_type: FlightType
    cabin: Cabin
    flights: list[Leg]
    passengers: list[Passenger]
    payment_history: list[Payment]
    created_at: str
    total_baggages: int
    nonfree_baggages: int
    insurance: Insurance
    status: Literal["cancelled"] | None


class Database(TypedDict):
    flights: dict[str, Flight]
    users: dict[str, User]
    reservations: dict[str, Reservation]


class FlightInfo(TypedDict):
    """How a call names a flight."""

    flight_number: str
    date: str


# ── Look-ups ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def find(world: World, table: str, key: Any) -> dict:
    """A row, not to be written to."""
    if (row := world.read(table, key)) is None:
        raise ToolError(f"{table[:-1].capitalize()} {key} not found")
    return row


def find_date(world: World, flight_number: Any, date: Any) -> dict:
    """A flight's status record on a date."""
    dates = find(world, "flights", flight_number)["dates"]
    if date not in dates:
        raise ToolError(f"Flight {flight_number} not found on date {date}")
    return dates[date]


def get_user_details(world: World, user_id: str):
    """A user's profile, payment methods and reservations.
    user_id: such as sara_doe_496"""
    return find(world, "users", user_id)


def get_reservation_details(world: World, reservation_id: str):
    """A reservation.
    reservation_id: such as 8JX2WO"""
    return find(world, "reservations", reservation_id)


def list_all_airports(world: World):
    """All airports: codes and cities."""
    pairs = (airport.split(maxsplit=1) for airport in AIRPORTS.split(","))
    return [{"iata": code, "city": city} for code, city in pairs]


def get_flight_status(world: World, flight_number: str, date: str):
    """The status of a flight on a date.
    flight_number: such as HAT001
    date: such as 2024-05-01"""
    return find_date(world, flight_number, date)["status"]


def search_direct_flight(world: World, origin: str, destination: str, date: str):
    """Flights from one airport to another on a date, with seats and prices by cabin.
    origin: airport code, such as JFK
    destination: airport code, such as LAX
    date: such as 2024-05-01"""
    return flights_between(world, origin, destination, date)


def search_onestop_flight(world: World, origin: str, destination: str, date: str):
    """Pairs of flights from one airport to another with one stop, the first of them on a date.
    origin: airport code, such as JFK
    destination: airport code, such as LAX
    date: such as 2024-05-01"""
    pairs = []
    for first in flights_between(world, origin, None, date):
        first["date"] = date
        arrival = first["scheduled_arrival_time_est"]
        next_date = f"2024-05-{int(date[-2:]) + 1}" if "+1" in arrival else date
        for second in flights_between(world, first["destination"], destination, next_date):
            if second["scheduled_departure_time_est"] >= arrival:
                pairs.append([first, second | {"date": next_date}])
    return pairs


def flights_between(world: World, origin: Any, destination: Any, date: Any) -> list[dict]:
    """Available flights on a date, in the database's order; None: any airport."""
    found = []
    for _, flight in world.rows("flights"):
        if (
            (origin is None or flight["origin"] == origin)
            and (destination is None or flight["destination"] == destination)
            and date in flight["dates"]
            and (day := flight["dates"][date])["status"] == "available"
        ):
            shown = {"flight_number": flight["flight_number"], "origin": flight["origin"]}
            shown |= {"destination": flight["destination"], "status": "available"}
            times = ("scheduled_departure_time_est", "scheduled_arrival_time_est")
            shown |= {time: flight[time] for time in times} | {"date": None}
            found.append(shown | {"available_seats": day["available_seats"], "prices": day["prices"]})
    return found


# ── Writes ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def records(values: Any, kind: Any) -> Any:
    """Objects as records of a kind. Anything else stays as it is, as upstream has it."""
    return [conform(v, kind) for v in values] if all(isinstance(v, dict) for v in values) else values


def flight_infos(flights: Any) -> list[dict]:
    """What `records` made of an argument, at the point where a flight is needed. Errors: something in it is no object."""
    if not all(isinstance(f, dict) for f in flights):
        raise ToolError("flights must be a list of objects")
    return flights


def seat_price(world: World, info: dict, cabin: Any, passengers: int) -> int:
    """What a seat costs. Errors: no such flight, not on sale, not enough seats."""
    number, date = info["flight_number"], info["date"]
    day = find_date(world, number, date)
    if day["status"] != "available":
        raise ToolError(f"Flight {number} not available on date {date}")
    if day["available_seats"][cabin] < passengers:
        raise ToolError(f"Not enough seats on flight {number}")
    return day["prices"][cabin]


def leg(world: World, info: dict, price: int) -> dict:
    flight = find(world, "flights", info["flight_number"])
    return conform(info | {"origin": flight["origin"], "destination": flight["destination"], "price": price}, Leg)


def book_reservation(
    world: World,
    user_id: str,
    origin: str,
    destination: str,
    flight_type: FlightType,
    cabin: Cabin,
    flights: list[FlightInfo],
    passengers: list[Passenger],
    payment_methods: list[Payment],
    total_baggages: int,
    nonfree_baggages: int,
    insurance: Insurance,
):
    """Book a reservation.
    user_id: such as sara_doe_496
    origin: airport code, such as SFO
    destination: airport code, such as JFK
    flight_type: one way or round trip
    cabin: of all legs
    flights: every leg, in order
    passengers: everyone who flies
    payment_methods: which of the user's methods pay how much; together the whole price
    total_baggages: checked bags, all passengers together
    nonfree_baggages: those of them that are paid for
    insurance: whether travel insurance is bought"""
    flights, passengers = records(flights, FlightInfo), records(passengers, Passenger)
    payments = records(payment_methods, Payment)
    find(world, "users", user_id)
    booking_id = new_booking_id(world)
    booking = {
        "reservation_id": booking_id,
        "user_id": user_id,
        "origin": origin,
        "destination": destination,
        "flight_type": flight_type,
        "cabin": cabin,
        "flights": [],
        "passengers": passengers,
        "payment_history": payments,
        "created_at": NOW,
        "total_baggages": total_baggages,
        "nonfree_baggages": nonfree_baggages,
        "insurance": insurance,
    }
    reservation = conform(booking, Reservation)
    n, total = len(passengers), 0
    for info in flight_infos(flights):
        price = seat_price(world, info, cabin, n)
        reservation["flights"].append(leg(world, info, price))
        total += price * n
    if insurance == "yes":
        total += 30 * n
    total += 50 * nonfree_baggages
    pay_booking(world, user_id, payments, total)
    for info in flights:
        world.edit("flights", info["flight_number"])["dates"][info["date"]]["available_seats"][cabin] -= n
    world.written["reservations", booking_id] = reservation
    world.edit("users", user_id)["reservations"].append(booking_id)
    return reservation


def new_booking_id(world: World) -> str:
    """The first free one of three."""
    for booking_id in ("HATHAT", "HATHAU", "HATHAV"):
        if world.read("reservations", booking_id) is None:
            return booking_id
    raise ToolError("Too many reservations")


def pay_booking(world: World, user_id: str, payments: list[dict], total: float) -> None:
    """Check all payments, then take them. Errors: unknown method, not enough on it, sum not equal to the price."""
    methods = find(world, "users", user_id)["payment_methods"]
    for payment in payments:
        if payment["payment_id"] not in methods:
            raise ToolError(f"Payment method {payment['payment_id']} not found")
        method = methods[payment["payment_id"]]
        if "amount" in method and method["amount"] < payment["amount"]:
            raise ToolError(f"Not enough balance in payment method {payment['payment_id']}")
    if (paid := sum(payment["amount"] for payment in payments)) != total:
        raise ToolError(f"Payment amount does not add up, total price is {total}, but paid {paid}")
    methods = world.edit("users", user_id)["payment_methods"]
    for payment in payments:
        method = methods[payment["payment_id"]]  # a KeyError if a certificate is given twice: the first use stays
        if method["source"] == "gift_card":
            method["amount"] -= payment["amount"]
        elif method["source"] == "certificate":
            del methods[payment["payment_id"]]


def cancel_reservation(world: World, reservation_id: str):
    """Cancel a whole reservation.
    reservation_id: such as ZFA04Y"""
    find(world, "reservations", reservation_id)
    reservation = world.edit("reservations", reservation_id)
    reservation["payment_history"] += [p | {"amount": -p["amount"]} for p in reservation["payment_history"]]
    reservation["status"] = "cancelled"
    return reservation


def pay_update(world: World, reservation_id: str, payment_id: Any, price: Any) -> None:
    """Take the price of a change (below 0: pay back) and note it in the reservation, if there is a price."""
    user_id = find(world, "reservations", reservation_id)["user_id"]
    methods = find(world, "users", user_id)["payment_methods"]
    if payment_id not in methods:
        raise ToolError("Payment method not found")
    source = methods[payment_id]["source"]
    if source == "certificate":
        raise ToolError("Certificate cannot be used to update reservation")
    if source == "gift_card":
        if methods[payment_id]["amount"] < price:
            raise ToolError("Gift card balance is not enough")
        world.edit("users", user_id)["payment_methods"][payment_id]["amount"] -= price
    if price != 0:
        payment = conform({"payment_id": payment_id, "amount": price}, Payment)
        world.edit("reservations", reservation_id)["payment_history"].append(payment)


def update_reservation_baggages(
    world: World, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
):
    """Change the number of checked bags of a reservation.
    reservation_id: such as ZFA04Y
    total_baggages: checked bags after the change
    nonfree_baggages: those of them that are paid for
    payment_id: one of the user's payment methods"""
    reservation = find(world, "reservations", reservation_id)
    price = 50 * max(0, nonfree_baggages - reservation["nonfree_baggages"])
    pay_update(world, reservation_id, payment_id, price)
    reservation = world.edit("reservations", reservation_id)
    reservation["total_baggages"], reservation["nonfree_baggages"] = total_baggages, nonfree_baggages
    return reservation


def update_reservation_flights(
    world: World, reservation_id: str, cabin: Cabin, flights: list[FlightInfo], payment_id: str
):
    """Change the flights or the cabin of a reservation.
    reservation_id: such as ZFA04Y
    cabin: of all legs
    flights: every leg after the change, unchanged ones included
    payment_id: one of the user's payment methods"""
    flights = records(flights, FlightInfo)
    reservation = find(world, "reservations", reservation_id)
    n, total, legs = len(reservation["passengers"]), 0, []
    for info in flight_infos(flights):
        same = (old for old in reservation["flights"] if info.items() <= old.items() and cabin == reservation["cabin"])
        if (kept := next(same, None)) is None:
            kept = leg(world, info, seat_price(world, info, cabin, n))
        legs.append(kept)
        total += kept["price"] * n
    total -= sum(old["price"] for old in reservation["flights"]) * n
    pay_update(world, reservation_id, payment_id, total)
    reservation = world.edit("reservations", reservation_id)
    reservation["flights"], reservation["cabin"] = legs, cabin
    return reservation


def update_reservation_passengers(world: World, reservation_id: str, passengers: list[Passenger]):
    """Change who flies; as many passengers as before.
    reservation_id: such as ZFA04Y
    passengers: everyone who flies"""
    passengers = records(passengers, Passenger)
    if len(passengers) != len(find(world, "reservations", reservation_id)["passengers"]):
        raise ToolError("Number of passengers does not match")
    reservation = world.edit("reservations", reservation_id)
    reservation["passengers"] = deepcopy(passengers)
    return reservation


def send_certificate(world: World, user_id: str, amount: int):
    """Give a user a certificate, as a gesture.
    user_id: such as sara_doe_496
    amount: its value in dollars"""
    methods = find(world, "users", user_id)["payment_methods"]
    for certificate in ("certificate_3221322", "certificate_3221323", "certificate_3221324"):
        if certificate not in methods:
            method = conform({"source": "certificate", "id": certificate, "amount": amount}, Balance)
            world.edit("users", user_id)["payment_methods"][certificate] = method
            return f"Certificate {certificate} added to user {user_id} with amount {amount}."
    raise ToolError("Too many certificates")


class Airline(Domain):
    """The domain object (see `tau2.Domain`)."""

    name = "airline"
    database = Database
    reads = (
        get_flight_status,
        get_reservation_details,
        get_user_details,
        list_all_airports,
        search_direct_flight,
        search_onestop_flight,
    )
    writes = (
        book_reservation,
        cancel_reservation,
        send_certificate,
        update_reservation_baggages,
        update_reservation_flights,
        update_reservation_passengers,
    )
    generic = (calculate, transfer_to_human_agents)
