//! The table of operations, and the roles that each needs.

use kvpool_auth::Roles;
use std::fmt;

/// The right that an operation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A valid token with any role.
    Known,
    /// One of these roles in the namespace of the request.
    Namespace(Roles),
    /// One of these roles for the whole pool.
    Pool(Roles),
}

/// The ways by which an operation can be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// The gRPC method of this name.
    Grpc(&'static str),
    /// The gRPC method of this name, and the frame of the same name.
    GrpcAndFrame(&'static str),
    /// The gRPC method of this name, for requests that need more rights than the method itself.
    MoreOf(&'static str),
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $label:literal, $via:expr, $need:expr, $audited:literal;)*) => {
        /// An operation of the control port.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Operation {
            $($(#[$doc])* $name,)*
        }

        impl Operation {
            /// All operations.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The name in messages and audit lines.
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)*
                }
            }

            /// The ways to call the operation.
            pub const fn via(self) -> Via {
                match self {
                    $(Self::$name => $via,)*
                }
            }

            /// The right that the operation needs.
            pub const fn need(self) -> Need {
                match self {
                    $(Self::$name => $need,)*
                }
            }

            /// Whether each call writes an audit line.
            pub const fn is_audited(self) -> bool {
                match self {
                    $(Self::$name => $audited,)*
                }
            }
        }
    };
}

use Need::{Known, Namespace, Pool};
use Via::{Grpc, GrpcAndFrame, MoreOf};

operations! {
    /// Opens a connection.
    Hello = "hello", GrpcAndFrame("Hello"), Known, false;
    /// Makes an existing namespace known to the caller.
    UseNamespace = "use_namespace", Grpc("CreateNamespace"), Namespace(Roles::READERS), false;
    /// Creates a namespace.
    CreateNamespace = "create_namespace", MoreOf("CreateNamespace"), Namespace(Roles::WRITERS), true;
    /// Changes the settings of a namespace, or creates a namespace with settings.
    ChangeNamespace = "change_namespace", Grpc("ChangeNamespace"), Pool(Roles::ADMINS), true;
    /// Deletes a namespace, and its blocks on request.
    DeleteNamespace = "delete_namespace", Grpc("DeleteNamespace"), Pool(Roles::ADMINS), true;
    /// Lists all namespaces with their usage.
    ListNamespaces = "list_namespaces", Grpc("ListNamespaces"), Pool(Roles::WATCHERS), false;
    /// Shows one namespace with its usage.
    ShowNamespace = "show_namespace", MoreOf("ListNamespaces"), Namespace(Roles::READERS), false;
    /// Asks for room for blocks.
    Reserve = "reserve", GrpcAndFrame("Reserve"), Namespace(Roles::WRITERS), false;
    /// Makes written blocks durable and visible.
    Commit = "commit", GrpcAndFrame("Commit"), Namespace(Roles::WRITERS), false;
    /// Gives grants back.
    Revoke = "revoke", Grpc("Revoke"), Namespace(Roles::WRITERS), false;
    /// Asks for the locations of blocks.
    Lookup = "lookup", GrpcAndFrame("Lookup"), Namespace(Roles::READERS), false;
    /// Asks whether blocks are present.
    Exist = "exist", GrpcAndFrame("Exist"), Namespace(Roles::READERS), false;
    /// Asks how many leading blocks of a chain are present.
    MatchPrefix = "match_prefix", GrpcAndFrame("MatchPrefix"), Namespace(Roles::READERS), false;
    /// Extends leases.
    Renew = "renew", GrpcAndFrame("Renew"), Namespace(Roles::READERS), false;
    /// Ends leases.
    Release = "release", GrpcAndFrame("Release"), Namespace(Roles::READERS), false;
    /// Removes blocks by key or pattern.
    Remove = "remove", Grpc("Remove"), Namespace(Roles::WRITERS), false;
    /// Removes leased and pinned blocks too, or every block of a namespace.
    RemoveForced = "remove_forced", MoreOf("Remove"), Namespace(Roles::ADMINS), true;
    /// Removes every block of every namespace.
    RemoveEverything = "remove_everything", MoreOf("Remove"), Pool(Roles::ADMINS), true;
    /// Pages through keys.
    List = "list", Grpc("List"), Namespace(Roles::READERS), false;
    /// Describes blocks.
    Describe = "describe", Grpc("Describe"), Namespace(Roles::READERS), false;
    /// Reports replicas that failed.
    ReportReplicas = "report_replicas", Grpc("ReportReplicas"), Namespace(Roles::READERS), false;
    /// Asks for the state of the pool. Only callers with [`Operation::WatchPool`] see all of it.
    Stats = "stats", Grpc("Stats"), Known, false;
    /// Forgets a medium.
    DetachMedium = "detach_medium", Grpc("DetachMedium"), Pool(Roles::ADMINS), true;
    /// Begins a task that copies, moves or drops replicas.
    ChangeReplicas = "change_replicas", Grpc("ChangeReplicas"), Pool(Roles::ADMINS), true;
    /// Asks for the progress of tasks.
    ReplicaTasks = "replica_tasks", Grpc("ReplicaTasks"), Pool(Roles::WATCHERS), false;
    /// Ends tasks.
    CancelTasks = "cancel_tasks", MoreOf("ReplicaTasks"), Pool(Roles::ADMINS), true;
    /// Drains a node.
    DrainNode = "drain_node", Grpc("DrainNode"), Pool(Roles::ADMINS), true;
    /// Ends the drain of a node.
    UndrainNode = "undrain_node", Grpc("UndrainNode"), Pool(Roles::ADMINS), true;
    /// Asks which master leads.
    Cluster = "cluster", Grpc("Cluster"), Known, false;
    /// Sees nodes, media, counters and all namespaces: stats in full, and the overview.
    WatchPool = "watch_pool", MoreOf("Cluster"), Pool(Roles::WATCHERS), false;
    /// Registers as a store node.
    Session = "session", Grpc("Session"), Pool(Roles::NODES), true;
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}
