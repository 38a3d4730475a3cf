"""Made-up folders of the kernel, for hosts with network interfaces and cards."""

IPV4, IPV6 = "0000:0000:0000:0000:0000:ffff:0a00:0001", "fe80:0000:0000:0000:0a00:00ff:fe00:0001"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
# The table of a RoCE port with an IPv4 address, as mlx5 fills it.
TABLE = (
    (IPV6, "IB/RoCE v1"),
    (IPV6, "RoCE v2"),
    (IPV4, "IB/RoCE v1"),
    (IPV4, "RoCE v2"),
    (EMPTY, None),
)


def plant(folder, texts):
    """Writes files, by their paths below a folder."""
    for name, text in texts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def add_interface(root, name, index, *, flags="0x1003", state="up", mtu=1500):
    texts = {"flags": flags, "operstate": state, "ifindex": index, "mtu": mtu}
    plant(root / "sys/class/net" / name, texts)


def add_port(root, device="mlx5_0", number=1, *, layer="Ethernet", state="4: ACTIVE", gids=TABLE):
    folder = root / f"sys/class/infiniband/{device}/ports/{number}"
    plant(folder, {"link_layer": layer, "state": state, "rate": "400 Gb/sec (4X NDR)"})
    for index, (address, kind) in enumerate(gids):
        plant(folder, {f"gids/{index}": address})
        if kind:  # the kernel gives an error instead of the text of an empty entry
            plant(folder / "gid_attrs", {f"types/{index}": kind, f"ndevs/{index}": "eth1"})
