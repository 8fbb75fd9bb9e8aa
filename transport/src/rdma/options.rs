//! The operator's RDMA settings, and why RDMA may be unavailable.

/// A node accepts no more queue pairs from one connection than these make on two ports.
const MOST_LANES: u8 = 16;

/// How RDMA is used on this host. The defaults suit RoCE v2 and InfiniBand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// The devices to use, as `name` or `name:port`; empty means every active port.
    pub devices: Vec<String>,
    /// The index into the ports' GID tables; `None` chooses by type, RoCE v2 first.
    pub gid_index: Option<u8>,
    /// The path MTU in bytes (256 to 4096, a power of two); `None` takes the port's. The smaller
    /// MTU of the two ends is used.
    pub mtu: Option<u32>,
    /// The traffic class of sent packets (RoCE: DSCP and ECN bits).
    pub traffic_class: u8,
    /// The service level of sent packets, 0 to 15.
    pub service_level: u8,
    /// The number of queue pairs for each port and direction to one node, 1 to 16. Several queue pairs use
    /// the device's parallelism, and different paths of a network that spreads connections.
    pub lanes: u8,
    /// The most work requests in a queue pair, at least 16. The device's limit applies.
    pub queue_depth: u32,
    /// The most bytes that a lane has in flight, unless a single work request has more.
    pub window: u64,
    /// The longest work request in bytes, at least 4096. Longer transfers are divided. The device's
    /// limit applies.
    pub slice: u32,
    /// The retransmissions after which the device gives up a silent peer.
    pub retry: Retry,
    /// The most ranges in the registration cache of a rail.
    pub cached_ranges: usize,
    /// The most bytes that the registration cache of a rail keeps registered.
    pub cached_bytes: u64,
}

/// The retransmissions after which the device gives up a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// How often an unacknowledged packet is sent again, at most 6. (Some devices take 7 as
    /// "forever".)
    pub count: u8,
    /// The time to wait for an acknowledgement: 4.096 us times two to this power, 1 to 31.
    pub timeout: u8,
}

/// Why RDMA is unavailable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// The library is absent or too old.
    #[error("libibverbs.so.1 (rdma-core 32 or later) cannot be used: {0}")]
    Library(String),
    /// The kernel knows no device.
    #[error("this host has no RDMA device")]
    NoDevice,
    /// Devices exist, but none is usable. Lists the reason for each.
    #[error("no RDMA device can be used: {0}")]
    NoPort(String),
    /// A requested device is absent or unusable.
    #[error("RDMA device {name}: {reason}")]
    Device {
        /// The device as requested.
        name: String,
        /// The reason.
        reason: String,
    },
    /// The value of an option is out of range.
    #[error("RDMA option {0}")]
    Option(String),
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            gid_index: None,
            mtu: None,
            traffic_class: 0,
            service_level: 0,
            lanes: 2,
            queue_depth: 128,
            window: 4 << 20,
            slice: 4 << 20,
            retry: Retry::default(),
            cached_ranges: 1024,
            cached_bytes: 8 << 30,
        }
    }
}

impl Default for Retry {
    /// One attempt takes about a quarter of a second, and all attempts take two seconds. That is long enough
    /// for a peer with busy cores. It is short enough that a lost packet does not use up a deadline.
    fn default() -> Self {
        Self {
            count: 6,
            timeout: 16,
        }
    }
}

impl RdmaOptions {
    /// Checks the range of every value.
    ///
    /// # Errors
    ///
    /// [`Unavailable::Option`] for the first value out of range.
    pub fn validate(&self) -> Result<(), Unavailable> {
        let wrong = |what: String| Err(Unavailable::Option(what));
        if let Some(mtu) = self.mtu
            && !(mtu.is_power_of_two() && (256..=4096).contains(&mtu))
        {
            return wrong(format!(
                "mtu: {mtu} is not one of 256, 512, 1024, 2048, 4096"
            ));
        }
        if self.service_level > 15 {
            return wrong(format!("service level: {} is over 15", self.service_level));
        }
        if self.retry.count > 6 {
            return wrong(format!("retry count: {} is over 6", self.retry.count));
        }
        if self.retry.timeout == 0 || self.retry.timeout > 31 {
            return wrong(format!(
                "ack timeout: {} is not 1 to 31",
                self.retry.timeout
            ));
        }
        if !(1..=MOST_LANES).contains(&self.lanes) {
            return wrong(format!("lanes: {} is not 1 to {MOST_LANES}", self.lanes));
        }
        if self.queue_depth < 16 {
            return wrong(format!("queue depth: {} is under 16", self.queue_depth));
        }
        if self.slice < 4096 {
            return wrong(format!("slice: {} is under 4096 bytes", self.slice));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_without_sense_are_refused() {
        let good = RdmaOptions::default();
        assert_eq!(good.validate(), Ok(()));
        for bad in [
            RdmaOptions {
                mtu: Some(1500),
                ..good.clone()
            },
            RdmaOptions {
                mtu: Some(8192),
                ..good.clone()
            },
            RdmaOptions {
                service_level: 16,
                ..good.clone()
            },
            RdmaOptions {
                retry: Retry {
                    count: 7,
                    timeout: 18,
                },
                ..good.clone()
            },
            RdmaOptions {
                retry: Retry {
                    count: 6,
                    timeout: 0,
                },
                ..good.clone()
            },
            RdmaOptions {
                lanes: 0,
                ..good.clone()
            },
            RdmaOptions {
                queue_depth: 1,
                ..good.clone()
            },
            RdmaOptions {
                slice: 100,
                ..good.clone()
            },
        ] {
            assert!(
                matches!(bad.validate(), Err(Unavailable::Option(_))),
                "{bad:?}"
            );
        }
    }
}
