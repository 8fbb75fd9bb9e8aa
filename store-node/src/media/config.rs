//! The setting `--ssd`, which describes one medium.

use bytesize::ByteSize;
use kvpool_types::Namespace;
use kvpool_types::medium::GRANULE;
use std::path::PathBuf;

/// The smallest medium: its superblocks and some zones.
const LEAST: ByteSize = ByteSize::mib(4);

/// One disk, partition or file for blocks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SsdConfig {
    /// The device or file, or the directory.
    pub(crate) path: PathBuf,
    /// Whether `path` is a directory. The node then takes the first file in it that no process has locked.
    pub(crate) in_directory: bool,
    /// For a file, its size; for a device, the part to use; whole granules. Without a size, a new file in a
    /// directory takes a share of the free space.
    pub(crate) size: Option<ByteSize>,
    /// Whether to format the device whatever its content, unless it is a medium of this pool.
    pub(crate) reset: bool,
    /// Drive writes per day; `None` for no limit.
    pub(crate) dwpd: Option<f64>,
    /// The namespaces whose blocks the medium takes; empty for all.
    pub(crate) namespaces: Vec<String>,
}

/// Why a list of media cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadSsd {
    /// An item does not begin with a path.
    #[error(
        "{0:?}: a medium begins with path= or dir=, for instance path=/var/lib/kvpool/ssd,size=1TiB"
    )]
    NoPath(String),
    /// The key does not exist.
    #[error("{0:?} is none of path=, dir=, size=, dwpd=, namespace= and reset")]
    Key(String),
    /// A medium has one value for the key. The last one would win, and a second size formats the medium.
    #[error("{key} is named twice for the medium {path:?}")]
    Twice {
        /// The key.
        key: &'static str,
        /// The path of the medium.
        path: String,
    },
    /// The value is not a size.
    #[error("{0:?} is not a size, such as 1TiB")]
    Size(String),
    /// The size is too small for a medium.
    #[error("{0:?} is too small for a medium: it has at least {LEAST}")]
    Small(String),
    /// No namespace can have this name.
    #[error("{name:?} is not the name of a namespace: {reason}")]
    Namespace {
        /// The name.
        name: String,
        /// The fault of the name.
        reason: String,
    },
    /// The number of drive writes per day is not a number, or not above zero.
    #[error("{0:?} is not a number of drive writes per day, such as 0.5")]
    Dwpd(String),
    /// A path is empty, or named twice.
    #[error("the path {0:?} is empty or named twice")]
    Path(String),
}

impl SsdConfig {
    /// Reads the items of a list that was split at its commas: `path=A`, `size=1GiB`, `path=B`, ...
    pub(crate) fn parse(items: &[String]) -> Result<Vec<Self>, BadSsd> {
        let mut media: Vec<Self> = Vec::new();
        for item in items.iter().map(|item| item.trim()) {
            let (file, directory) = (item.strip_prefix("path="), item.strip_prefix("dir="));
            if let Some(path) = file.or(directory) {
                let path = PathBuf::from(path);
                let in_directory = directory.is_some();
                // Several files of one directory may be requested.
                let is_known = !in_directory && media.iter().any(|other| other.path == path);
                if path.as_os_str().is_empty() || is_known {
                    return Err(BadSsd::Path(path.display().to_string()));
                }
                media.push(Self {
                    path,
                    in_directory,
                    size: None,
                    reset: false,
                    dwpd: None,
                    namespaces: Vec::new(),
                });
                continue;
            }
            let Some(medium) = media.last_mut() else {
                return Err(BadSsd::NoPath(item.to_owned()));
            };
            let path = medium.path.display().to_string();
            let twice = |key| BadSsd::Twice { key, path };
            if let Some(size) = item.strip_prefix("size=") {
                if medium.size.is_some() {
                    return Err(twice("size="));
                }
                let bad = || BadSsd::Size(size.to_owned());
                let bytes = kvpool_types::size::parse(size).map_err(|_| bad())?;
                medium.size = Some(ByteSize(bytes)).filter(|size| size.0 > 0);
                if medium.size.is_none() {
                    return Err(bad());
                }
                if medium.size < Some(LEAST) {
                    return Err(BadSsd::Small(ByteSize(bytes).to_string()));
                }
                medium.size = Some(ByteSize(bytes / GRANULE * GRANULE));
            } else if let Some(text) = item.strip_prefix("dwpd=") {
                if medium.dwpd.is_some() {
                    return Err(twice("dwpd="));
                }
                let dwpd: Option<f64> = text.parse().ok();
                medium.dwpd = dwpd.filter(|dwpd| dwpd.is_finite() && *dwpd > 0.0);
                if medium.dwpd.is_none() {
                    return Err(BadSsd::Dwpd(text.to_owned()));
                }
            } else if let Some(name) = item.strip_prefix("namespace=") {
                check_namespace(name)?;
                medium.namespaces.push(name.to_owned());
            } else if item == "reset" {
                if medium.reset {
                    return Err(twice("reset"));
                }
                medium.reset = true;
            } else {
                return Err(BadSsd::Key(item.to_owned()));
            }
        }
        Ok(media)
    }
}

fn check_namespace(name: &str) -> Result<(), BadSsd> {
    let namespace = Namespace {
        name: name.to_owned(),
        ..Namespace::default()
    };
    let bad = |reason: String| BadSsd::Namespace {
        name: name.to_owned(),
        reason,
    };
    if name.is_empty() {
        return Err(bad("it is empty".to_owned()));
    }
    namespace.validate().map_err(|error| bad(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<SsdConfig>, BadSsd> {
        let items: Vec<String> = text.split(',').map(str::to_owned).collect();
        SsdConfig::parse(&items)
    }

    #[test]
    fn media_are_read_as_they_are_written() {
        let media = parse("path=/dev/nvme0n1p1,path=/ssd,size=2TiB,reset").unwrap();
        let [device, file] = media.as_slice() else {
            panic!("{media:?}");
        };
        assert_eq!(
            (device.path.to_str(), device.size, device.reset),
            (Some("/dev/nvme0n1p1"), None, false)
        );
        assert_eq!(
            (file.path.to_str(), file.size, file.reset),
            (Some("/ssd"), Some(ByteSize::tib(2)), true)
        );
        let media = parse("path=/a,dwpd=0.5,namespace=x,namespace=y").unwrap();
        assert_eq!(media[0].dwpd, Some(0.5));
        assert_eq!(media[0].namespaces, ["x", "y"]);
        let media = parse("dir=/ssd,size=1GiB,dir=/ssd").unwrap();
        assert_eq!(media.len(), 2);
        assert!(media.iter().all(|one| one.in_directory));
        assert_eq!(media[0].size, Some(ByteSize::gib(1)));
        assert_eq!(SsdConfig::parse(&[]), Ok(Vec::new()));
    }

    #[test]
    fn a_size_is_rounded_down_to_granules() {
        for (text, bytes) in [
            ("100GB", 99_999_997_952),
            ("4MiB", 4 << 20),
            ("8388609", 8 << 20),
        ] {
            let media = parse(&format!("path=/a,size={text}")).unwrap();
            assert_eq!(media[0].size, Some(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn each_mistake_is_named() {
        for (text, mistake) in [
            ("size=1GiB", BadSsd::NoPath("size=1GiB".into())),
            ("/ssd", BadSsd::NoPath("/ssd".into())),
            ("path=", BadSsd::Path(String::new())),
            ("dir=", BadSsd::Path(String::new())),
            ("path=/a,path=/a", BadSsd::Path("/a".into())),
            ("path=/a,size=much", BadSsd::Size("much".into())),
            ("path=/a,size=0", BadSsd::Size("0".into())),
            ("path=/a,size=99999EiB", BadSsd::Size("99999EiB".into())),
            ("path=/a,size=1MiB", BadSsd::Small("1.0 MiB".into())),
            ("path=/a,dwpd=0", BadSsd::Dwpd("0".into())),
            ("path=/a,dwpd=x", BadSsd::Dwpd("x".into())),
            ("path=/a,zone=1", BadSsd::Key("zone=1".into())),
        ] {
            assert_eq!(parse(text), Err(mistake), "{text}");
        }
        let twice = [
            ("size=8MiB,size=16MiB", "size="),
            ("dwpd=1,dwpd=1", "dwpd="),
            ("reset,size=8MiB,reset", "reset"),
        ];
        for (keys, key) in twice {
            let path = "/a".to_owned();
            let parsed = parse(&format!("path=/b,size=8MiB,dwpd=1,reset,path=/a,{keys}"));
            assert_eq!(parsed, Err(BadSsd::Twice { key, path }), "{keys}");
        }
        for name in ["", "a b", "é", &"x".repeat(256)] {
            let parsed = parse(&format!("path=/a,namespace={name}"));
            let is_named =
                matches!(&parsed, Err(BadSsd::Namespace { name: bad, .. }) if bad == name);
            assert!(is_named, "{parsed:?}");
        }
    }
}
