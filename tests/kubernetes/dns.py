#!/usr/bin/env python3
"""A name server for a small Kubernetes cluster: the addresses of its Services, over UDP.

    dns.py ADDRESS API TOKEN        for instance: dns.py 10.200.0.1 https://127.0.0.1:16443 secret

It answers A for SERVICE.NAMESPACE.svc.cluster.local and POD.SERVICE.NAMESPACE.svc.cluster.local, as CoreDNS does.
"""

import json
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.request

DOMAIN = ".svc.cluster.local"
A, IN, NO_SUCH_NAME = 1, 1, 3
SECONDS_TO_KEEP = 5


class Names:
    """The names that the cluster has now."""

    def __init__(self, api, token):
        self.api, self.token = api, token
        self.addresses = {}
        self.trust = ssl.create_default_context()
        self.trust.check_hostname = False
        self.trust.verify_mode = ssl.CERT_NONE

    def items(self, kind):
        request = urllib.request.Request(f"{self.api}/api/v1/{kind}", headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, context=self.trust, timeout=5) as answer:
            return json.load(answer)["items"]

    def read(self):
        found = {}
        headless = set()
        for service in self.items("services"):
            name = service["metadata"]["name"] + "." + service["metadata"]["namespace"] + DOMAIN
            address = service["spec"].get("clusterIP")
            if address == "None":
                headless.add(name)
                found.setdefault(name, [])
            elif address:
                found[name] = [address]
        for endpoints in self.items("endpoints"):
            name = endpoints["metadata"]["name"] + "." + endpoints["metadata"]["namespace"] + DOMAIN
            if name not in headless:
                continue
            for subset in endpoints.get("subsets") or []:
                for address in subset.get("addresses") or []:
                    found[name].append(address["ip"])
                    if "hostname" in address:
                        found[address["hostname"] + "." + name] = [address["ip"]]
        self.addresses = found

    def follow(self):
        while True:
            try:
                self.read()
            except OSError as error:
                print(f"cannot read the services: {error}", flush=True)
            time.sleep(0.5)


def asked(packet):
    """The name and type of a query, and where it ends."""
    labels, at = [], 12
    while packet[at]:
        labels.append(packet[at + 1 : at + 1 + packet[at]].decode("ascii", "replace").lower())
        at += 1 + packet[at]
    (kind,) = struct.unpack_from("!H", packet, at + 1)
    return ".".join(labels), kind, at + 5


def answer(packet, addresses):
    name, kind, end = asked(packet)
    known = addresses.get(name)
    found = known if known and kind == A else []
    flags = 0x8580 | (NO_SUCH_NAME if known is None else 0)
    header = packet[:2] + struct.pack("!HHHHH", flags, 1, len(found), 0, 0)
    records = [struct.pack("!HHHIH", 0xC00C, A, IN, SECONDS_TO_KEEP, 4) + socket.inet_aton(ip) for ip in found]
    return header + packet[12:end] + b"".join(records)


def main():
    address, api, token = sys.argv[1:]
    names = Names(api, token)
    threading.Thread(target=names.follow, daemon=True).start()
    port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    port.bind((address, 53))
    while True:
        packet, sender = port.recvfrom(512)
        try:
            port.sendto(answer(packet, names.addresses), sender)
        except (IndexError, struct.error):
            print(f"a query that cannot be read from {sender}", flush=True)


if __name__ == "__main__":
    main()
