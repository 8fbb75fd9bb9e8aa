//! What can be set, and why there may be nothing to set.

/// A node takes no more queue pairs over one connection than these make on two ports.
const MOST_LANES: u8 = 16;

/// How RDMA is used on this host. The defaults suit RoCE v2 and InfiniBand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// The devices to use, as `name` or `name:port`; empty means every active port.
    pub devices: Vec<String>,
    /// Which entry of the ports' GID tables to use; `None` picks by type, RoCE v2 first.
    pub gid_index: Option<u8>,
    /// The path MTU in bytes (256 to 4096, a power of two); `None` takes the port's. Of two ends the
    /// smaller counts.
    pub mtu: Option<u32>,
    /// The traffic class (RoCE: DSCP and ECN bits) of what is sent.
    pub traffic_class: u8,
    /// The service level of what is sent.
    pub service_level: u8,
    /// How many queue pairs a client has on each port for each way, to the same node: one serves what
    /// another is busy with, in the device and on the paths of a network that spreads connections.
    pub lanes: u8,
    /// How many work requests a queue pair holds; the device's limit cuts it.
    pub queue_depth: u32,
    /// How many bytes a lane has in flight at most, unless one work request alone has more.
    pub window: u64,
    /// The longest work request in bytes; longer transfers are sliced. The device's limit cuts it.
    pub slice: u32,
    /// How long a silent peer is waited for.
    pub retry: Retry,
    /// How many ranges the registration cache of a rail keeps.
    pub cached_ranges: usize,
    /// How many bytes the registration cache of a rail keeps registered.
    pub cached_bytes: u64,
}

/// When the device gives a peer up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// How often a packet that was not acknowledged is sent again, up to 6. (What 7 means differs
    /// between devices: with some it is "for ever".)
    pub count: u8,
    /// The time to wait for an acknowledgement: 4.096 us times two to this, up to 31.
    pub timeout: u8,
}

/// Why there is no RDMA here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// The library is not there, or too old.
    #[error("libibverbs.so.1 (rdma-core 32 or later) cannot be used: {0}")]
    Library(String),
    /// The kernel knows no device.
    #[error("this host has no RDMA device")]
    NoDevice,
    /// There are devices, none of them usable; why, for each.
    #[error("no RDMA device can be used: {0}")]
    NoPort(String),
    /// An asked device is not there or cannot be used.
    #[error("RDMA device {name}: {reason}")]
    Device {
        /// As it was asked for.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An option has no sense.
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
    /// About a quarter of a second an attempt, two seconds in all: long enough for a peer whose cores are
    /// busy, short enough for a lost packet not to use a deadline up.
    fn default() -> Self {
        Self {
            count: 6,
            timeout: 16,
        }
    }
}

impl RdmaOptions {
    /// Whether every value can be used.
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
