//! The settings of a namespace as a tenant: quotas, guaranteed share, priority, rates.

use std::fmt;

/// The priority of a namespace without the setting.
pub const DEFAULT_PRIORITY: u64 = 5;
/// The highest priority. The lowest is 0.
pub const MAX_PRIORITY: u64 = 9;

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $label:literal;)*) => {
        /// One setting of a namespace. Its number is the same on the wire and in the log.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Setting {
            $($(#[$doc])* $name = $number,)*
        }

        impl Setting {
            /// All settings, in order of their numbers.
            pub const ALL: &[Setting] = &[$(Setting::$name,)*];

            /// The setting with this number; `None` for a setting that this version does not know.
            pub const fn from_wire(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// The name, for flags, logs and JSON.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)*
                }
            }

            /// The setting with this name.
            pub fn from_label(label: &str) -> Option<Self> {
                match label {
                    $($label => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

settings! {
    /// The soft quota of memory in bytes. Above it, the namespace's blocks are evicted before blocks of other
    /// namespaces.
    MemorySoft = 1, "memory_soft";
    /// The hard quota of memory in bytes, with open puts.
    MemoryHard = 2, "memory_hard";
    /// The hard quota of media in bytes. At the quota, blocks get no copy.
    MediaHard = 3, "media_hard";
    /// The soft quota of blocks in memory. Above it, the namespace's blocks are evicted before those of
    /// others.
    BlocksSoft = 4, "blocks_soft";
    /// The hard quota of blocks in memory, with open puts.
    BlocksHard = 5, "blocks_hard";
    /// The bytes of the namespace's blocks in memory that eviction for other namespaces does not take.
    Guaranteed = 6, "guaranteed";
    /// The priority, 0 to 9. Blocks of a lower priority are evicted first.
    Priority = 7, "priority";
    /// The most calls per second.
    Requests = 8, "requests_per_second";
    /// The most bytes per second, counted over blocks that puts reserve and lookups find.
    Bytes = 9, "bytes_per_second";
}

impl Setting {
    /// The number on every wire and in the log.
    pub const fn to_wire(self) -> u32 {
        self as u32
    }

    const fn index(self) -> usize {
        self as usize - 1
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

const COUNT: usize = Setting::ALL.len();

/// The settings of one namespace. A namespace without settings has no limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NamespaceSettings([Option<u64>; COUNT]);

/// Why settings are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A soft quota, or the guaranteed share, exceeds the hard quota.
    #[error("{lower} ({value}) exceeds {upper} ({limit})")]
    Exceeds {
        /// The setting that is too large.
        lower: Setting,
        /// Its value.
        value: u64,
        /// The setting that bounds it.
        upper: Setting,
        /// The value of the bound.
        limit: u64,
    },
    /// The priority exceeds [`MAX_PRIORITY`].
    #[error("priority {0} is out of range: 0 to {MAX_PRIORITY}")]
    Priority(u64),
    /// A rate of zero would refuse every call.
    #[error("{0} must be above 0; clear it for no limit")]
    ZeroRate(Setting),
}

impl NamespaceSettings {
    /// The value of a setting; `None` when it is not set.
    pub const fn get(&self, setting: Setting) -> Option<u64> {
        self.0[setting.index()]
    }

    /// Sets a value, or clears it with `None`.
    pub const fn set(&mut self, setting: Setting, value: Option<u64>) {
        self.0[setting.index()] = value;
    }

    /// A copy of the settings with one more value.
    pub const fn with(mut self, setting: Setting, value: u64) -> Self {
        self.set(setting, Some(value));
        self
    }

    /// The settings that are set, in order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (Setting, u64)> + '_ {
        let all = Setting::ALL.iter().copied();
        all.filter_map(|setting| Some((setting, self.get(setting)?)))
    }

    /// True when nothing is set.
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Checks the values against their ranges and each other.
    ///
    /// # Errors
    ///
    /// See [`SettingsError`].
    pub fn validate(&self) -> Result<(), SettingsError> {
        for (lower, upper) in [
            (Setting::MemorySoft, Setting::MemoryHard),
            (Setting::BlocksSoft, Setting::BlocksHard),
            (Setting::Guaranteed, Setting::MemoryHard),
        ] {
            if let (Some(value), Some(limit)) = (self.get(lower), self.get(upper))
                && value > limit
            {
                return Err(SettingsError::Exceeds {
                    lower,
                    value,
                    upper,
                    limit,
                });
            }
        }
        match self.get(Setting::Priority) {
            Some(priority) if priority > MAX_PRIORITY => {
                return Err(SettingsError::Priority(priority));
            }
            _ => {}
        }
        for rate in [Setting::Requests, Setting::Bytes] {
            if self.get(rate) == Some(0) {
                return Err(SettingsError::ZeroRate(rate));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_round_trip() {
        for setting in Setting::ALL {
            assert_eq!(Setting::from_wire(setting.to_wire()), Some(*setting));
            assert_eq!(Setting::from_label(setting.label()), Some(*setting));
        }
        assert_eq!(
            (Setting::from_wire(0), Setting::from_wire(u32::MAX)),
            (None, None)
        );
    }

    #[test]
    fn settings_are_checked_at_their_edges() {
        use Setting::*;
        let of = |setting, value| NamespaceSettings::default().with(setting, value);
        let good = [
            of(MemoryHard, 0),
            of(MemorySoft, 5).with(MemoryHard, 5),
            of(Guaranteed, 5).with(MemoryHard, 5),
            of(Priority, MAX_PRIORITY),
            of(Requests, 1).with(Bytes, 1),
        ];
        for settings in good {
            settings.validate().unwrap();
        }
        let bad = [
            of(MemorySoft, 6).with(MemoryHard, 5),
            of(BlocksSoft, 1).with(BlocksHard, 0),
            of(Guaranteed, 6).with(MemoryHard, 5),
            of(Priority, MAX_PRIORITY + 1),
            of(Requests, 0),
            of(Bytes, 0),
        ];
        for settings in bad {
            settings.validate().unwrap_err();
        }
    }

    #[test]
    fn a_cleared_setting_is_not_set() {
        let mut settings = NamespaceSettings::default().with(Setting::Priority, 2);
        assert_eq!(
            settings.iter().collect::<Vec<_>>(),
            [(Setting::Priority, 2)]
        );
        settings.set(Setting::Priority, None);
        assert!(settings.is_empty());
    }
}
